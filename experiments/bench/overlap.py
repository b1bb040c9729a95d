"""What a GPU compiler sends while it computes, with and without --overlap. Read from programs that no GPU has run.

python -m experiments.bench overlap                      # gpt2-124m on dp=8, bf16, ZeRO 0 to 3, for H200s
python -m experiments.bench overlap --zeros 3 --num-layers 4 --dump hlo
python -m experiments.bench overlap --mesh pp=4 --schedule zb-h1 --zeros 0
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from rich.console import Console

from jaxdist.config import RunConfig
from jaxdist.plan.proof.compile import CompiledStep, compile_step, without_devices
from jaxdist.strategy import Dtype

from ..cli import CommonFlags, ModelName, set_precision
from ..tables import Rows


@dataclass(frozen=True)
class OverlapFlags(CommonFlags):
    """Compile a layout with and without overlap; count the matrix products between a collective's start and done."""

    COMMON: ClassVar[tuple[str, ...]] = (
        *CommonFlags.LAYOUT,
        "model",
        "batch_size",
        "dtype",
        "zeros",
        "compile",
        "dump",
    )

    mesh: str = "dp=8"
    model: ModelName = "gpt2-124m"
    dtype: Dtype = "bfloat16"
    batch_size: int = 64
    zeros: tuple[int, ...] = field(default=(0, 1, 2, 3))
    """ZeRO stages, one after the other."""
    compile: str = "h200"
    """An NVIDIA card; it need not be there."""
    dump: str | None = None
    """Folder for the programs' text."""


def main(flags: OverlapFlags, console: Console) -> None:
    base = flags.run_config()
    set_precision(base)
    without_devices(base.parallel.mesh.num_devices)
    loops = "messages in loops: matrix products between start and done"
    sizes = ("MiB sent", "while computing", "share", "in loops", "peak GiB", "compile s")
    table = Rows("ZeRO", "overlap", *sizes, loops)
    done = 0
    for zero in flags.zeros:
        for overlap in (False, True):
            parallel = dataclasses.replace(base.parallel, zero=zero, overlap=overlap)
            config = dataclasses.replace(base, parallel=parallel)
            dump = flags.dump and str(Path(flags.dump) / f"zero{zero}-{'overlap' if overlap else 'plain'}")
            done += 1
            with console.status(f"compiling ZeRO-{zero} ({done} of {2 * len(flags.zeros)})"):
                table.add_row(*row(config, compile_step(config, flags.compile, dump=dump)))
    table.print(console, left=("overlap", loops), under=(loops,))
    console.print(f"{flags.model}, {base.parallel.mesh}, {flags.dtype}; compiled for {flags.compile}, nothing was run.")


def row(config: RunConfig, compiled: CompiledStep) -> list[str]:
    parallel, mib = config.parallel, 2**20
    # A pipeline's own loops and branches run as its table says: the text does not know how often.
    sent = [(c, size) for c in compiled.collectives if (size := c.sent_bytes(parallel.mesh)) is not None]
    unknown = len(compiled.collectives) - len(sent)
    total = sum(size for _, size in sent)
    hidden = sum(size for c, size in sent if c.matmuls)
    loops = [c for c, _ in sent if c.count > 1]
    return [
        str(parallel.zero),
        "yes" if parallel.overlap else "no",
        f"{total / mib:,.0f}" + f" + {unknown} uncounted" * (unknown > 0),
        f"{hidden / mib:,.0f}",
        f"{hidden / total:.0%}",
        f"{sum(size for c, size in sent if c.count > 1) / mib:,.0f}",
        f"{compiled.peak / 2**30:.2f}",
        f"{compiled.seconds:.0f}",
        ", ".join(f"{c.kind} x{c.count}: {c.matmuls}" for c in loops) or "none",
    ]
