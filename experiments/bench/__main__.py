"""The one place of measurement.

python -m experiments.bench strategies   state, peak and sent bytes of each strategy, time, equality with one device
python -m experiments.bench step         one step on --mesh, phase by phase; tokens/s, MFU; memory planned and measured
python -m experiments.bench peers        one device and meshes beside plain JAX, automatic sharding, PyTorch, DDP, FSDP2
python -m experiments.bench kernels      the operations of a step one by one, each beside PyTorch's
python -m experiments.bench profile      the operations of a step on --mesh by what they came from, as XLA reports them
python -m experiments.bench overhead     what the mesh machinery costs: one device against plain jit, 8 against one
python -m experiments.bench collectives  each collective over sizes: algbw and busbw as NCCL tests define them
python -m experiments.bench scaling      time and bytes against width, depth, sequence, batch, ranks: fitted exponents
python -m experiments.bench flags        compiler options: which this jaxlib accepts, what each gains or costs
python -m experiments.bench compile      compile time against depth
python -m experiments.bench search       layouts a second that experiments.plan enumerates, scores and ranks
python -m experiments.bench pipeline     every schedule: ticks, memory predicted and compiled, compile time
python -m experiments.bench checkpoint   what saving adds to steps, how long a restore takes, host memory of a save
python -m experiments.bench parity       one device in bf16 against fp32: loss and every gradient leaf; no collectives
python -m experiments.bench executor     the pipeline's executor on one stage against jax.grad: values and time
python -m experiments.bench standin      one GPU runs one rank's program of a larger mesh; beside the plan's step time
python -m experiments.bench input        token files of 0.1, 1 and 10 GB: opening, memory, tokens/s, share of a step

Everything is warmed up, measured several times and given as a median with its spread. Times of simulated devices are
ratios on one CPU, never the speed of a cluster. `--json` writes rows of one form (`experiments.bench.rows`).
"""

import dataclasses
import importlib
import os

from rich.console import Console

from experiments.bench.flags import BenchFlags
from experiments.bench.rows import describe_machine, write_rows
from experiments.cli import make_folder, refuse_ignored, require_writable, run_program, set_precision
from jaxdist.config import ParallelConfig, require_positive
from jaxdist.errors import ConfigError

STRATEGY = {field.name for field in dataclasses.fields(ParallelConfig)} - {"attention"}
SHAPE = {"preset", "num_layers", "width", "num_heads", "seq_len", "vocab_size"}
PLAIN = {"dtype", "reduce_dtype", "dropout", "optimizer"}  # the plain step is AdamW in fp32 without dropout

# bench -> (module, function, flags that it would not use, beside those of the strategy)
BENCHES = {
    "step": ("step", "bench_step", set()),
    "peers": ("peers", "bench_peers", PLAIN - {"dtype"}),
    "kernels": ("kernels", "bench_kernels", PLAIN - {"dtype"}),
    "profile": ("profile", "bench_profile", set()),
    "strategies": ("strategies", "bench_strategies", set()),
    "overhead": ("overhead", "bench_overhead", PLAIN),
    "collectives": ("collectives", "bench_collectives", SHAPE | PLAIN | {"batch_size"}),
    "scaling": ("scaling", "bench_scaling", set()),
    "flags": ("compiler_flags", "bench_flags", set()),
    "parity": ("parity", "bench_parity", PLAIN),
    "executor": ("executor", "bench_executor", PLAIN | {"batch_size"}),
    "standin": ("standin", "bench_standin", set()),
    "compile": ("compiling", "bench_compile", set()),
    "pipeline": ("pipelines", "bench_pipeline", {"num_layers", "batch_size"}),
    "search": ("planning", "bench_search", SHAPE | {"batch_size", "dtype", "device"}),
    "checkpoint": ("checkpoints", "bench_checkpoint", set()),
    "input": ("inputs", "bench_input", set()),
}


def main(flags: BenchFlags, console: Console) -> int:
    require_positive("repeats", flags.repeats)
    require_positive("save_every", flags.save_every)
    module, function, unused = BENCHES[flags.which]
    strategy = (
        set()
        if flags.which in ("step", "profile", "standin")
        else STRATEGY - ({"mesh"} if flags.which == "collectives" else set())
    )
    used = {field.name for field in dataclasses.fields(flags)} - strategy - unused
    refuse_ignored(flags, used, f"the table of `{flags.which}` has rows of its own and would not use it")
    require_writable("--json", flags.json)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # a peer's process needs memory of the card as well
    make_folder("--draw", flags.draw)
    if not flags.depths:
        raise ConfigError("--depths", "at least one number of layers is needed", "Use --depths 12 48")
    if not flags.gigabytes or min(flags.gigabytes) < 0.01:
        raise ConfigError("--gigabytes", "at least one size of 0.01 or more is needed", "Use --gigabytes 0.1 1 10")
    config = flags.run_config()
    set_precision(config)
    bench = getattr(importlib.import_module(f"experiments.bench.{module}"), function)
    rows, devices, ok = bench(flags, config, console)
    if flags.json:
        write_rows(flags.json, describe_machine(devices) | {"model": dataclasses.asdict(config.model)}, rows)
    return 0 if ok else 1


if __name__ == "__main__":
    run_program(BenchFlags, main, "experiments.bench")
