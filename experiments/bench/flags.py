"""The flags of every bench."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from experiments.cli import CommonFlags
from jaxdist.config import Preset, RunConfig

Bench = Literal[
    "step", "peers", "kernels", "strategies", "overhead", "collectives", "scaling", "flags",
    "compile", "pipeline", "search", "checkpoint", "input", "parity", "executor", "standin", "profile",
]  # fmt: skip
ONE_STEP = {"step", "peers", "kernels", "flags", "parity", "standin", "profile"}


@dataclass(frozen=True)
class BenchFlags(CommonFlags):
    """Measure, as ratios in one run. Strategy flags are set by each bench's own table."""

    which: tyro.conf.Positional[Bench] = "strategies"
    preset: Annotated[Preset | None, tyro.conf.arg(aliases=["--model"])] = None
    """Model shape. Default: gpt-11m for what measures one step or proves one, tiny for scaling, gpt-7m otherwise."""
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
    draw: str | None = None
    """For `scaling`: also draw scaling.svg and scaling.png in this folder."""
    json: str | None = None
    """Also write the figures to this file."""

    def run_config(self) -> RunConfig:
        if self.preset is not None:
            return super().run_config()
        preset = "gpt-11m" if self.which in ONE_STEP else {"scaling": "tiny"}.get(self.which, "gpt-7m")
        return dataclasses.replace(self, preset=preset).run_config()
