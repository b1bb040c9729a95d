"""Published layouts beside what a plan recommends for the same model, batch and cards.

python -m experiments.calibration.published           # every row: minutes
python -m experiments.calibration.published --only 405b

Both layouts are predicted as runs of this program ("here"), so that they differ in nothing but the layout. The
published time is that of the program that ran: its kernels and its overlap are other ones.
"""

import dataclasses
from dataclasses import dataclass

from rich.console import Console

from jaxdist.config import RunConfig
from jaxdist.errors import ConfigError
from jaxdist.mesh import parse_mesh
from jaxdist.models.base import Model
from jaxdist.models.presets import PRESETS
from jaxdist.plan.fit_remat import with_arrays
from jaxdist.plan.hardware import Cluster, find_hardware
from jaxdist.plan.parts import work_of
from jaxdist.plan.search import Candidates, Scored, rank, score, search, usable_bytes
from jaxdist.plan.time_model import PARTS, efficiency_of
from jaxdist.strategy import ParallelConfig, PrecisionConfig

from ..entry import run_program
from ..plan_report import layout_words, row_layout
from ..progress import Progress

TOLD = 0.02  # of the published layout's step: a part that differs by more is named


@dataclass(frozen=True)
class Published:
    """A run on H100s, in bf16, with what was printed of its speed: one of the last two.

    sequences: of an update. settings: of `ParallelConfig`, as near as this program has them.
    """

    name: str
    preset: str
    seq_len: int
    sequences: int
    mesh: str
    settings: dict
    source: str
    tokens_per_s: float = 0.0  # of a GPU
    tflops: float = 0.0  # of a GPU, of the model's products
    every_score: bool = False  # whether `tflops` counts the scores of attention that a causal mask hides

    @property
    def model(self) -> Model:
        return dataclasses.replace(PRESETS[self.preset], seq_len=self.seq_len)

    @property
    def num_devices(self) -> int:
        return parse_mesh(self.mesh).num_devices

    @property
    def config(self) -> RunConfig:
        parallel = ParallelConfig(parse_mesh(self.mesh), **self.settings)
        return RunConfig(self.model, parallel, precision=PrecisionConfig("bfloat16"), batch_size=self.sequences)

    @property
    def seconds(self) -> float:
        """Seconds of a step, as published."""
        tokens = self.sequences * self.seq_len / self.num_devices
        if self.tokens_per_s:
            return tokens / self.tokens_per_s
        work = work_of(self.model)
        scores = sum(
            12 * each.heads * each.head_dim * (self.seq_len if self.every_score else each.seen(self.seq_len))
            for each in work.attention
        )
        layer = 3 * sum(p.flops for p in work.layer if not p.batched) + scores
        a_token = work.num_layers * layer + 3 * sum(p.flops for p in work.loss)
        return tokens * a_token / (self.tflops * 1e12)


# MPT's tokens/s are printed for 8 cards, and its MFU for all.
FSDP = {"zero": 3, "overlap": True}
MEGATRON = {"zero": 1, "overlap": True, "schedule": "interleaved"}
META = "arXiv 2407.21783, table 4; its chunks are not printed"
ROWS = (
    Published("7B", "7b", 2048, 6 * 128, "dp=128", FSDP, "llm-foundry, MPT", tokens_per_s=10_643 * 45.71 / 46.44),
    Published("7B", "7b", 2048, 6 * 512, "dp=512", FSDP, "llm-foundry, MPT", tokens_per_s=10_643 * 42.20 / 46.44),
    Published("Llama 3 8B", "llama3-8b", 8192, 256, "dp=128", FSDP, "arXiv 2410.06511, compiled", tokens_per_s=6514),
    Published(
        "Llama 3 70B",
        "llama3-70b",
        8192,
        512,
        "dp=32,tp=8",
        {"zero": 3, "sp": True, "remat": "block", "overlap": True},
        "arXiv 2410.06511, tp not overlapped",
        tokens_per_s=597.3,
    ),
    Published(
        "Mixtral 8x7B",
        "mixtral-8x7b",
        4096,
        256,
        "pp=4,dp=16,ep=8",
        MEGATRON | {"chunks": 8, "microbatches": 16},
        "Megatron Core 0.8, README of its mixtures",
        tflops=438,
        every_score=True,
    ),
    Published(
        "Llama 3 405B",
        "llama3-405b",
        8192,
        2048,
        "pp=16,dp=64,tp=8",
        MEGATRON | {"sp": True, "chunks": 4, "microbatches": 32},
        META,
        tflops=430,
    ),
    Published(
        "Llama 3 405B",
        "llama3-405b",
        8192,
        2048,
        "pp=16,dp=128,tp=8",
        MEGATRON | {"sp": True, "chunks": 4, "microbatches": 16},
        META,
        tflops=400,
    ),
    Published(
        "Llama 3 405B",
        "llama3-405b",
        131_072,
        128,
        "pp=16,dp=8,cp=16,tp=8",
        MEGATRON | {"sp": True, "chunks": 4, "microbatches": 16, "cp_kind": "all-gather"},
        META,
        tflops=380,
    ),
)


@dataclass
class PublishedFlags:
    """Published layouts beside what a plan recommends for the same model, batch and cards."""

    only: str = ""
    """Rows whose name contains this alone."""


@dataclass(frozen=True)
class Compared:
    """One published run, and both layouts as `score` and `search` have them."""

    row: Published
    theirs: Scored
    ours: Scored

    @property
    def gain(self) -> float:
        """Fraction of the published layout's step that the recommended one saves; below 0 where it takes longer."""
        return 1 - float(self.ours.time.total[0] / self.theirs.time.total[0])

    def differences(self) -> list[str]:
        """What of the step differs, largest first."""
        found = {}
        for part in PARTS:
            theirs, ours = (float(getattr(each.time, part)[0]) for each in (self.theirs, self.ours))
            if abs(theirs - ours) > TOLD * float(self.theirs.time.total[0]):
                found[f"{part} {theirs:.2f} to {ours:.2f} s"] = abs(theirs - ours)
        return sorted(found, key=lambda words: -found[words])

    def sentence(self) -> str:
        """How they compare, and in what."""
        limit = usable_bytes(self.theirs.cluster) / 2**30
        if self.theirs.layouts.parallel(0) == self.ours.layouts.parallel(0):
            said = "The published layout is recommended"
        else:
            more = "less" if self.gain > 0 else "more"
            said = f"The recommended layout takes {abs(self.gain):.0%} {more}" if abs(self.gain) >= 0.005 else "As fast"
            said += f": {', '.join(self.differences())}" if self.differences() else ""
        if not self.theirs.fits[0]:
            said += f"; the published one needs more than {limit:.0f} GiB in this program"
        return f"{said}."


def compare(row: Published) -> Compared:
    cluster = Cluster(find_hardware("h100"), row.num_devices // 8)
    theirs = score(row.config, Candidates.of(row.config), cluster, "cudnn")
    found = search(dataclasses.replace(row.config, parallel=ParallelConfig()), cluster, "cudnn")
    found = with_arrays(found, "cudnn", efficiency_of("h100"))
    if not found.num_fitting:
        raise ConfigError(row.name, "must have a layout that fits", "Use more devices")
    return Compared(row, theirs, found.take(rank(found)[:1]))


def main(flags: PublishedFlags, console: Console) -> int:
    rows = [row for row in ROWS if flags.only.lower() in row.name.lower()]
    if not rows:
        names = ", ".join(dict.fromkeys(row.name for row in ROWS))
        raise ConfigError(f"--only {flags.only}", "must be part of a row's name", f"Use a part of {names}")
    found = []
    with Progress("searching, published runs") as progress:
        for done, row in enumerate(rows):
            progress.update(done, len(rows))
            found.append(compare(row))
    for each in found:
        row = each.row
        sizes = f"{row.num_devices:,} H100s, {row.sequences:,} sequences of {row.seq_len:,} tokens"
        console.print(f"\n[bold]{row.name}[/], {sizes} ({row.source})")
        console.print(f"published    {row.seconds:6.2f} s")
        for name, one in (("here", each.theirs), ("recommended", each.ours)):
            seconds, mfu, memory = float(one.time.total[0]), float(one.time.mfu[0]), float(one.memory.total[0]) / 2**30
            figures = f"{seconds:6.2f} s  {mfu:3.0%} MFU  {memory:5.1f} GiB"
            console.print(f"{name:<12} {figures}  {layout_words(row_layout(one, 0))}", highlight=False)
        console.print(each.sentence(), highlight=False)
    return 0


if __name__ == "__main__":
    run_program(PublishedFlags, main, "calibration.published")
