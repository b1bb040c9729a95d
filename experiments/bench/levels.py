"""Prediction against compiler, layout by layout: peak bytes a device, and every collective.

python -m experiments.bench levels           # 55 layouts, predicted and compiled for simulated CPUs
python -m experiments.bench levels --run     # and run, every collective's executions counted
python -m experiments.bench levels --compile h200 --dtype bfloat16
python -m experiments.bench levels --compile h200 --large    # adapters, experts and long sequences at their full size
"""

import dataclasses
import json
import statistics
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

from rich.console import Console

from jaxdist.config import OptimizerConfig, RunConfig
from jaxdist.errors import ConfigError
from jaxdist.mesh import parse_mesh
from jaxdist.models.lora import ALPHA_PER_RANK, LoRA
from jaxdist.models.presets import PRESETS
from jaxdist.models.registry import SIZES
from jaxdist.plan.proof.compile import CUDA_CARDS, without_devices
from jaxdist.plan.proof.executed import Miscounted, executed_step, miscounted
from jaxdist.plan.proof.levels import Levels, levels
from jaxdist.strategy import ParallelConfig, PrecisionConfig

from ..cli import CommonFlags, refuse_ignored, set_precision
from ..entry import chosen, require_writable, write_output
from ..progress import Progress
from ..tables import print_columns
from .timing import planned_memory

LAYOUTS: list[tuple[str, dict]] = [
    ("", {}),
    *(("dp=4", {"remat": remat}) for remat in ("none", "selective", "block", "every-2", "every-4")),
    *(("dp=4", {"zero": zero}) for zero in (1, 2, 3)),
    ("dp=4", {"zero": 3, "reshard_after_forward": False}),
    ("dp=4", {"zero": 3, "remat": "block"}),
    ("dp=2", {"accumulate": 4}),
    ("dp=2", {"accumulate": 4, "zero": 1, "remat": "block"}),
    ("dp=2", {"accumulate": 2, "zero": 2}),
    ("dp=4", {"zero": 2, "remat": "selective"}),
    ("dp=4", {"grad_sync": "flat"}),
    ("dp=4", {"grad_sync": "per-parameter", "zero": 1}),
    ("tp=2", {}),
    ("tp=4", {}),
    ("tp=4", {"sp": True}),
    ("tp=2", {"sp": True, "remat": "selective"}),
    ("tp=4", {"sp": True, "remat": "block"}),
    ("dp=2,tp=2", {"sp": True, "zero": 1}),
    ("dp=2,tp=2", {"sp": True, "zero": 3}),
    ("dp=2,tp=4", {"zero": 3, "remat": "block"}),
    ("replica=2,dp=2", {"zero": 3}),
    ("replica=2,dp=2,tp=2", {"zero": 2, "remat": "every-2"}),
    *(("pp=4", {"schedule": name}) for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "v-half", "v-min")),
    ("pp=4", {"remat": "block"}),
    ("pp=2", {"remat": "selective"}),
    ("pp=2", {"remat": "every-2", "microbatches": 8}),
    ("pp=2,dp=2", {"zero": 1}),
    ("pp=2,dp=2", {"zero": 2, "schedule": "zb-h1"}),
    ("pp=2,dp=2", {"zero": 3, "remat": "block"}),
    ("pp=2,tp=2", {"sp": True}),
    ("pp=2,dp=2,tp=2", {"sp": True, "zero": 1, "schedule": "interleaved"}),
    ("pp=2,dp=2,tp=2", {"zero": 3, "schedule": "zb-v"}),
    ("pp=2,dp=2", {"accumulate": 2, "microbatches": 4}),
    ("dp=4", {"loss_chunks": 8}),
    ("dp=2,tp=2", {"sp": True, "zero": 3, "loss_chunks": 4}),
    ("dp=2", {"accumulate": 4, "loss_chunks": 8, "remat": "block"}),
    ("pp=2,tp=2", {"zero": 1, "loss_chunks": 4}),
    ("pp=4", {"overlap": True}),
    ("pp=2,dp=2,tp=2", {"sp": True, "zero": 1, "schedule": "zb-v", "overlap": True}),
    *(("dp=4", {"zero": zero, "overlap": True}) for zero in (0, 1, 3)),
    ("dp=2", {"zero": 2, "overlap": True, "accumulate": 4}),
    ("dp=2,tp=2", {"zero": 3, "sp": True, "overlap": True, "remat": "block"}),
]


class Large(NamedTuple):
    """A layout of a published model, in bfloat16. lora: rank of its adapters; 0 for none. compiled: GiB for an H200, by
    jax 0.10.2."""

    model: str
    seq_len: int
    batch_size: int
    mesh: str
    more: dict
    compiled: float
    lora: int = 0
    capacity: float | None = None
    optimizer: str = "adamw"

    def config(self) -> RunConfig:
        changes = {"seq_len": self.seq_len} | ({"capacity": self.capacity} if self.capacity else {})
        model = dataclasses.replace(PRESETS[self.model], **changes)
        if self.lora:
            model = LoRA(model, self.lora, ALPHA_PER_RANK * self.lora)
        rest = {"optimizer": OptimizerConfig(self.optimizer), "precision": PrecisionConfig("bfloat16")}
        return with_layout(RunConfig(model, batch_size=self.batch_size, **rest), self.mesh, self.more, "h200")


BLOCK = {"remat": "block"}
LARGE = {
    "LoRA of 70B": Large("llama3-70b", 4096, 16, "dp=4,tp=2", {"zero": 3, "sp": True} | BLOCK, 32.51, lora=16),
    "LoRA of 32B": Large("qwen3-32b", 4096, 16, "dp=8", {"zero": 3} | BLOCK, 16.82, lora=16),
    "LoRA of 8B": Large("llama3-8b", 4096, 32, "dp=8", {"zero": 3, "accumulate": 4} | BLOCK, 4.98, lora=16),
    "LoRA of 8B, nothing repeated": Large("llama3-8b", 4096, 8, "dp=8", {"zero": 3}, 15.51, lora=16),
    "LoRA of 8B, ZeRO-1": Large(
        "llama3-8b", 4096, 32, "dp=4,tp=2", {"zero": 1, "accumulate": 4} | BLOCK, 10.88, lora=16
    ),
    "8x7B": Large("mixtral-8x7b", 4096, 128, "dp=64,ep=8", {"zero": 3} | BLOCK, 21.34),
    "8x7B, capacity": Large("mixtral-8x7b", 4096, 128, "dp=64,ep=8", {"zero": 3} | BLOCK, 19.40, capacity=1.25),
    "8x7B, no ep": Large("mixtral-8x7b", 4096, 128, "dp=64", {"zero": 3} | BLOCK, 27.07),
    "8x7B, pipeline": Large(
        "mixtral-8x7b", 4096, 128, "pp=4,dp=16,ep=8", {"zero": 1, "microbatches": 8} | BLOCK, 37.86
    ),
    "8x7B, experts over tp": Large(
        "mixtral-8x7b",
        4096,
        128,
        "dp=32,ep=4,tp=2",
        {"zero": 3, "sp": True, "experts_over_tp": True} | BLOCK,
        21.85,
        capacity=1.25,
    ),
    "8x7B, tp=8": Large(
        "mixtral-8x7b", 4096, 64, "dp=8,ep=8,tp=8", {"zero": 1, "sp": True, "accumulate": 4} | BLOCK, 17.15
    ),
    "30B-A3B, ZeRO-1": Large(
        "qwen3-30b-a3b", 4096, 32, "dp=8,ep=8,tp=2", {"zero": 1, "sp": True, "accumulate": 4} | BLOCK, 42.70
    ),
    "30B-A3B": Large("qwen3-30b-a3b", 4096, 32, "dp=32,ep=8", {"zero": 3} | BLOCK, 19.55),
    "1B, ring": Large("llama3.2-1b", 8192, 8, "dp=2,cp=4", {"zero": 3} | BLOCK, 6.23),
    "0.6B, ulysses": Large("qwen3-0.6b", 8192, 8, "dp=2,cp=4", {"zero": 3, "cp_kind": "ulysses"} | BLOCK, 4.71),
    "8B, ulysses": Large(
        "llama3-8b", 8192, 16, "dp=2,cp=4", {"zero": 3, "cp_kind": "ulysses", "accumulate": 4} | BLOCK, 24.37
    ),
    "8B, one bucket": Large("llama3-8b", 2048, 8, "dp=8", {"zero": 1, "grad_sync": "flat"} | BLOCK, 74.79),
    "30B-A3B, Muon": Large("qwen3-30b-a3b", 2048, 32, "dp=32,ep=8", {"zero": 3} | BLOCK, 15.27, optimizer="muon"),
    "8B": Large("llama3-8b", 4096, 8, "dp=8", {"zero": 3} | BLOCK, 20.57),
    "70B": Large("llama3-70b", 4096, 64, "dp=8,tp=8", {"zero": 3, "sp": True, "accumulate": 4} | BLOCK, 25.64),
}


@dataclass(frozen=True)
class LevelsFlags(CommonFlags):
    """Compare what the trace predicts with what a compiler plans. Strategy flags are set by the table itself."""

    COMMON: ClassVar[tuple[str, ...]] = ("model", "batch_size", "dtype", "compile", "only", "run", "large", "json")

    compile: str = "cpu"
    """cpu, an NVIDIA card (a100-40, a100-80, h100, h200, b200) or a TPU (v5e, v5p, v6e); it need not be there."""
    only: str = ""
    """Run the layouts whose name contains this, as in zero=3."""
    num_layers: int | None = 8
    width: int | None = 256
    num_heads: int | None = 8
    seq_len: int | None = 256
    vocab_size: int | None = 8192
    run: bool = False
    """Run one step of each layout under XLA's profiler, and count there how often every device runs each collective
    (--compile cpu)."""
    large: bool = False
    """The rows of published models with adapters, experts or long sequences, in bfloat16, for an NVIDIA card."""
    json: str | None = None
    """File for every row."""


USED = {*SIZES, "batch_size", "dtype", "reduce_dtype"} - {"dropout"}


def main(flags: LevelsFlags, console: Console) -> int:
    used = {"large", "compile", "only", "json"} | (set() if flags.large else USED | {"run"})
    refuse_ignored(flags, used, "the table has rows for it")
    require_writable("--json", flags.json)
    if flags.run and flags.compile != "cpu":
        raise ConfigError("--run", "--compile must be cpu, which can run here", "Use --run with --compile cpu")
    base = flags.run_config()
    set_precision(base)
    if flags.large and flags.compile not in CUDA_CARDS:
        raise ConfigError("--large", "--compile must be an NVIDIA card", f"Use --compile with {', '.join(CUDA_CARDS)}")
    named = {name_of(layout): partial(with_layout, base, *layout, flags.compile) for layout in LAYOUTS}
    if flags.large:
        named = {f"{name}: {row.mesh}": row.config for name, row in LARGE.items()}
    without_devices(max(make().parallel.mesh.num_devices for make in named.values()))
    rows, wrong, names = [], {}, chosen(flags.only, list(named))
    with Progress("compiling layouts") as progress:
        for name in names:
            progress.update(len(rows), len(names))
            config = named[name]()
            nodes = -(-config.parallel.mesh.num_devices // 8) if flags.large else 1
            found = levels(config, flags.compile, num_nodes=nodes)
            rows.append((name, found, formula_bytes(config)))
            if flags.run:
                wrong[name] = miscounted(found.compiled, executed_step(config, found.compiled), config.parallel.mesh)
    print_summary(console, rows)
    errors = [abs(found.peak_error) for _, found, _ in rows]
    if errors:
        worst = max(rows, key=lambda row: abs(row[1].peak_error))
        console.print(
            f"{len(rows)} layouts, {flags.compile}, {config.precision.dtype}: peak predicted with an error of "
            f"{statistics.mean(errors):.1%} in the mean and {max(errors):.1%} at most ({worst[0]})"
        )
        apart = [abs(formula / found.predicted.peak - 1) for _, found, formula in rows]
        console.print(
            f"The planner's closed form, made for accelerators, is {statistics.mean(apart):.1%} from the trace in the "
            f"mean and {max(apart):.1%} at most."
        )
    if flags.run:
        print_executed(console, wrong, rows)
    else:
        console.print("Predicted from the trace; compiled for devices that need not be there; nothing was run.")
    if flags.json:
        write_output("--json", flags.json, json.dumps([record(*row) for row in rows], indent=1))
    return 1 if any(wrong.values()) else 0


def name_of(layout: tuple[str, dict]) -> str:
    mesh, more = layout
    return ", ".join([mesh or "1 device", *(f"{key}={value}" for key, value in more.items())])


def formula_bytes(config: RunConfig) -> float:
    """What the search would say (`jaxdist.plan.program_memory`)."""
    return float(planned_memory(config).total[0])


def with_layout(base: RunConfig, mesh: str, more: dict, target: str) -> RunConfig:
    """cuDNN's attention where the target has it, the written-out one elsewhere; in a ring of cp by blocks."""
    cudnn = target in CUDA_CARDS and base.precision.dtype in ("bfloat16", "float16")
    parallel = ParallelConfig(mesh=parse_mesh(mesh), **more)
    if parallel.mesh.cp == parallel.cp_split[0]:
        parallel = dataclasses.replace(parallel, attention="cudnn" if cudnn else "xla")
    return dataclasses.replace(base, parallel=parallel)


def print_summary(console: Console, rows: list[tuple[str, Levels, float]]) -> None:
    """A row for each layout."""
    columns = {
        "layout": [name for name, _, _ in rows],
        "state MiB": [mib(found.state) for _, found, _ in rows],
        "formula MiB": [mib(formula) for _, _, formula in rows],
        "predicted MiB": [mib(found.predicted.peak) for _, found, _ in rows],
        "compiled MiB": [mib(found.compiled.peak) for _, found, _ in rows],
        "error": [f"{found.peak_error:+.1%}" for _, found, _ in rows],
        "compile s": [f"{found.compiled.seconds:.1f}" for _, found, _ in rows],
        "collectives, compiled against traced": [differences(found) for _, found, _ in rows],
    }
    collectives = list(columns)[-1]
    under = ("state MiB", "formula MiB", "compile s", collectives)
    print_columns(console, columns, left=("layout", collectives), under=under)


def print_executed(console: Console, wrong: dict[str, list[Miscounted]], rows: list) -> None:
    """What ran otherwise than it was counted, one line for each collective."""
    for name, found in wrong.items():
        for each in found:
            what = f"{each.collective.name} ({each.collective.kind} over {','.join(each.collective.axes)})"
            console.print(f"{name}: {what} ran {each.executed} times on stage {each.stage}, counted {each.counted}")
    collectives = sum(len(found.compiled.collectives) for _, found, _ in rows)
    counted = sum(len({each.collective.name for each in found}) for found in wrong.values())
    console.print(
        f"One step of each was run: {collectives - counted} of {collectives} collectives of the compiled programs ran"
        " on every device as often as they were counted."
    )


def mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f}"


def differences(found: Levels) -> str:
    """What the compiler changed, by kind and axes; what is equal or merely combined is only counted."""
    same = sum(row.why.startswith("equal") for row in found.sent)
    rest = [f"{row.kind} over {','.join(row.axes)}: {row.why}" for row in found.sent if not row.why.startswith("equal")]
    return "; ".join([f"{same} of {len(found.sent)} equal", *rest])


def record(name: str, found: Levels, formula: float) -> dict:
    return {
        "layout": name,
        "state_bytes": found.state,
        "formula_bytes": formula,
        "predicted_bytes": found.predicted.peak,
        "compiled_bytes": found.compiled.peak,
        "error": found.peak_error,
        "compile_seconds": found.compiled.seconds,
        "trace_seconds": found.trace_seconds,
        "sent": [{**dataclasses.asdict(row), "why": row.why} for row in found.sent],
    }
