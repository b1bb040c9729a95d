"""The one place of measurement.

python -m experiments.bench --help      says what each bench measures

Everything is warmed up, measured several times and given as a median with its spread. Times of simulated devices are
ratios on one CPU, never the speed of a cluster. `--json` writes rows of one form (`experiments.bench.rows`).
"""

import dataclasses
import importlib
import math
import os
from contextlib import nullcontext

from rich.console import Console

from jaxdist.errors import ConfigError, require_positive, require_within
from jaxdist.models.registry import SIZES
from jaxdist.strategy import ParallelConfig

from ..cli import refuse_ignored, require_formulas, set_precision
from ..entry import flag_word, require_writable, run_program
from .flags import BenchFlags
from .rows import describe_machine, print_rows, write_rows

STRATEGY = {field.name for field in dataclasses.fields(ParallelConfig)} - {"attention"}
SHAPE = {"model", *SIZES} - {"ffn_width", "dropout"}
# Flags of single benches, refused by the others.
OWN = {
    "step": {"phases"},
    "flags": {"start_within"},
    "collectives": {"message_bytes"},
    "compile": {"depths"},
    "input": {"gigabytes"},
    "checkpoint": {"save_every"},
    "roofline": {"hardware"},
}
# Say no status themselves.
SILENT = {"matrices", "step", "peers", "profile", "collectives", "search", "parity", "executor", "standin", "roofline"}
ALL_ROWS = {"only"}  # where no row can be left out
ANY_MODEL = {"step", "flags", "standin", "profile", "experts", "roofline", "peers"}  # the others: GPT-2
PLAIN = {"dtype", "reduce_dtype", "dropout", "optimizer"}  # the plain step is AdamW in fp32 without dropout

# bench -> (module, function, flags that it would not use, beside those of the strategy)
BENCHES = {
    "step": ("step", "bench_step", ALL_ROWS),
    "peers": ("peers", "bench_peers", PLAIN - {"dtype"}),
    "kernels": ("kernels", "bench_kernels", PLAIN - {"dtype"}),
    "profile": ("profile", "bench_profile", ALL_ROWS),
    "roofline": ("roofline", "bench_roofline", ALL_ROWS | {"device", "repeats"}),
    "strategies": ("strategies", "bench_strategies", set()),
    "overhead": ("overhead", "bench_overhead", PLAIN),
    "telemetry": ("telemetry", "bench_telemetry", PLAIN),
    "collectives": ("collectives", "bench_collectives", SHAPE | PLAIN | {"batch_size"}),
    "flags": ("compiler_flags", "bench_flags", set()),
    "parity": ("parity", "bench_parity", PLAIN | ALL_ROWS),
    "executor": ("executor", "bench_executor", PLAIN | ALL_ROWS | {"batch_size"}),
    "standin": ("standin", "bench_standin", ALL_ROWS),
    "compile": ("compiling", "bench_compile", ALL_ROWS),
    "pipeline": ("pipelines", "bench_pipeline", {"num_layers", "batch_size"}),
    "search": ("planning", "bench_search", SHAPE | ALL_ROWS | {"batch_size", "dtype", "device"}),
    "matrices": ("matrices", "bench_matrices", SHAPE | PLAIN | ALL_ROWS | {"batch_size", "device", "repeats"}),
    "experts": ("experts", "bench_experts", PLAIN - {"dtype"} | {"num_layers", "vocab_size"}),
    "checkpoint": ("checkpoints", "bench_checkpoint", ALL_ROWS),
    "input": ("inputs", "bench_input", ALL_ROWS),
}


def main(flags: BenchFlags, console: Console) -> int:
    require_positive("repeats", flags.repeats)
    require_positive("save_every", flags.save_every)
    module, function, unused = BENCHES[flags.which]
    used = {field.name for field in dataclasses.fields(flags)} - unused - set().union(*OWN.values())
    if flags.which not in ("step", "profile", "standin", "roofline"):
        used -= STRATEGY - ({"mesh"} if flags.which == "collectives" else set())
    refuse_ignored(flags, used | OWN.get(flags.which, set()), f"`{flags.which}` has no use for it")
    require_writable("--json", flags.json)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # a peer's process needs memory of the card as well
    for gigabytes in flags.gigabytes:
        require_within("gigabytes", gigabytes, 0.01, 1000)
    for name in ("depths", "gigabytes", "message_bytes"):
        if not getattr(flags, name):
            raise ConfigError(flag_word(name, None), "must have at least one number", "Leave it out")
    # Collectives run on a mesh without a model, which it need not divide.
    config = (dataclasses.replace(flags, mesh="") if flags.which == "collectives" else flags).run_config()
    if flags.which not in ANY_MODEL:
        require_formulas("bench", config.model)
    set_precision(config)
    bench = getattr(importlib.import_module(f".{module}", __package__), function)
    with console.status(f"measuring: {flags.which}") if flags.which in SILENT else nullcontext():
        rows, devices = bench(flags, config, console)
    if flags.only and not rows and flags.start_within == math.inf:  # a time limit may leave rows out as well
        raise ConfigError(f"--only {flags.only}", "must be part of a row's name", f"Run {flags.which} without it")
    if devices is not None:
        console.print(f"devices: {devices.description}", markup=False)
    if rows:
        print_rows(rows, console)
    if flags.json:
        write_rows(flags.json, describe_machine(devices) | {"model": dataclasses.asdict(config.model)}, rows)
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    run_program(BenchFlags, main, "bench")
