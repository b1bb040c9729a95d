"""The flags of every bench."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import tyro

from jaxdist.config import RunConfig
from jaxdist.plan.hardware import find_hardware

from ..cli import CommonFlags

ABOUT = {
    "strategies": "state, peak and sent bytes of each strategy, time, equality with one device",
    "step": "one step on --mesh, phase by phase; tokens/s, MFU; memory planned and measured",
    "peers": "one device and meshes beside plain JAX, automatic sharding, PyTorch, DDP, FSDP2",
    "kernels": "the operations of a step one by one, each beside PyTorch's",
    "roofline": "the step compiled for a GPU that need not be there: bytes, FLOPs and least time of its kernels",
    "profile": "the operations of a step on --mesh by what they came from, as XLA reports them",
    "overhead": "what the mesh machinery costs: one device against plain jit, 8 against one",
    "telemetry": "what measuring a run costs, against one step on one device",
    "collectives": "each collective over sizes: algbw and busbw as NCCL tests define them",
    "flags": "compiler options: which this jaxlib accepts, what each gains or costs",
    "compile": "compile time against depth",
    "matrices": "what Muon adds to an update of Llama-3 8B on 64 cards: bytes, FLOPs, predicted time",
    "search": "layouts a second that `plan` enumerates, scores and ranks",
    "pipeline": "every schedule: ticks, memory predicted and compiled, compile time",
    "checkpoint": "what saving adds to steps, how long a restore takes, host memory of a save",
    "parity": "one device in bf16 against fp32: loss and every gradient leaf; no collectives",
    "executor": "the pipeline's executor on one stage against jax.grad: values and time",
    "standin": "one GPU, which it needs, runs one rank's program of --mesh; beside the plan's step time",
    "experts": "ways to multiply rows by the matrices of the experts that they chose",
    "input": "token files of 0.1, 1 and 10 GB: opening, memory, tokens/s, share of a step",
}
ONE_STEP = {"step", "roofline", "peers", "kernels", "flags", "parity", "standin", "profile"}


@dataclass(frozen=True)
class BenchFlags(CommonFlags):
    """Measure, as ratios in one run. Strategy flags are set by each bench's own table."""

    COMMON: ClassVar[tuple[str, ...]] = (
        "which",
        "model",
        "mesh",
        "batch_size",
        "dtype",
        "device",
        "repeats",
        "only",
        "json",
    )
    GROUPS: ClassVar[dict[str, str]] = {"which": "measurement"}

    which: Annotated[
        Literal[tuple(ABOUT)],
        tyro.conf.Positional,
        tyro.conf.arg(help="\n".join(f"{name}: {text}." for name, text in ABOUT.items())),
    ] = "strategies"
    model: Annotated[str | None, tyro.conf.arg(aliases=["--preset"])] = None
    """A preset. Default: gpt-11m for what measures one step or proves one, moe-10m for experts,
    gpt-7m otherwise."""
    batch_size: int = 8
    repeats: int = 5
    """Times each figure is measured; tables show the median."""
    only: str = ""
    """Rows whose name contains this text."""
    phases: bool = True
    """For `step`: also its phases, each of which is a program to compile."""
    start_within: float = math.inf
    """For `flags`: no further option is tried after this many seconds."""
    message_bytes: tuple[int, ...] = (1 << 16, 1 << 20, 1 << 24)
    """For `collectives`."""
    depths: tuple[int, ...] = (12, 48)
    """For `compile`."""
    gigabytes: tuple[float, ...] = (0.1, 1, 10)
    """For `input`: files written to the temporary folder and removed again."""
    save_every: int = 50
    """For `checkpoint`: steps between two saves."""
    hardware: str = "h100"
    """For `roofline`: the card that the step is compiled for."""
    json: str | None = None
    """Also write the figures to this file."""

    def run_config(self) -> RunConfig:
        if self.model is not None:
            return super().run_config()
        model = "gpt-11m" if self.which in ONE_STEP else "moe-10m" if self.which == "experts" else "gpt-7m"
        return dataclasses.replace(self, model=model).run_config()

    def with_remat(self, config: RunConfig, gib: float | None) -> RunConfig:
        if self.which != "roofline":
            return super().with_remat(config, gib)
        from jaxdist.plan.fit_remat import fit_on_hardware

        return fit_on_hardware(config, find_hardware(self.hardware), gib)
