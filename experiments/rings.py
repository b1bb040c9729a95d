"""What a compiler for H200 makes of the collectives of tp, as they are and as rings, and of those of cp.

No GPU is needed.

python -m experiments.rings      (with the CUDA compiler: pip install -e '.[prove-cuda]')

Two layers of the 7b preset on tp=8 with sequence parallelism, and of Llama 3 8B on cp=8 with 131,072 positions, each
recomputed; in bf16. `under a matmul`: asynchronous collectives of
the program text with a matmul scheduled between start and done. That says what may overlap, not how long it takes.
"""

import dataclasses
from dataclasses import dataclass

from rich.console import Console

from jaxdist.config import ParallelConfig, PrecisionConfig, RunConfig
from jaxdist.mesh import MeshShape
from jaxdist.models.presets import PRESETS
from jaxdist.plan.hardware import GIB
from jaxdist.plan.proof.compile import compile_step, require_compiler

from .cli import run_program
from .progress import Progress

TARGET = "h200"
MODEL = dataclasses.replace(PRESETS["7b"], num_layers=2)


@dataclass(frozen=True)
class RingsFlags:
    """Compile two layers of 7B on tp=8 for an H200 that need not be there, with each --tp-ring, and of Llama 3 8B on
    cp=8, with each --cp-kind; count what may overlap.

    It takes no flags, and needs the CUDA compiler (the extra prove-cuda).
    """


LONG = dataclasses.replace(PRESETS["llama3-8b"], num_layers=2, seq_len=131_072)


def config_of(tp_ring: str, batch_size: int = 4) -> RunConfig:
    parallel = ParallelConfig(MeshShape(tp=8), sp=True, tp_ring=tp_ring)
    return RunConfig(MODEL, parallel, precision=PrecisionConfig("bfloat16"), batch_size=batch_size)


def main(flags: RingsFlags, console: Console) -> None:
    require_compiler(TARGET)
    print("| --tp-ring | asynchronous | under a matmul | over tp, MB sent in blocks | peak, GiB |")
    print("|---|--:|--:|--:|--:|")
    for ring in ("none", "one-way", "two-way"):
        config = config_of(ring)
        with Progress(f"compiling --tp-ring {ring}"):
            compiled = compile_step(config, TARGET)
        started = [c for c in compiled.collectives if c.asynchronous]
        activation = config.batch_size * MODEL.seq_len * MODEL.width * 2  # bytes
        large = [c for c in compiled.collectives if c.full_bytes >= activation // 8 and c.count == MODEL.num_layers]
        sent = sum(c.sent_bytes(config.parallel.mesh) for c in large) / 1e6
        covered = sum(c.matmuls > 0 for c in started)
        print(f"| {ring} | {len(started)} | {covered} | {sent:,.1f} | {compiled.peak / GIB:.3f} |", flush=True)
    print("\n| --cp-kind | over cp in layers | under a matmul | GB sent in them | peak, GiB |")
    print("|---|--:|--:|--:|--:|")
    for kind in ("ring", "all-gather", "ulysses", "usp-4"):
        parallel = ParallelConfig(MeshShape(cp=8), cp_kind=kind, remat="block")
        config = RunConfig(LONG, parallel, precision=PrecisionConfig("bfloat16"), batch_size=1)
        with Progress(f"compiling --cp-kind {kind}"):
            compiled = compile_step(config, TARGET)
        found = [c for c in compiled.collectives if c.kind != "all_reduce"]  # which sum gradients and numbers
        sent = sum(c.sent_bytes(parallel.mesh) for c in found) / 1e9
        covered = sum(c.matmuls > 0 for c in found)
        print(f"| {kind} | {len(found)} | {covered} | {sent:,.2f} | {compiled.peak / GIB:.2f} |", flush=True)


if __name__ == "__main__":
    run_program(RingsFlags, main, "rings")
