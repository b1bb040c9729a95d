"""A run as it goes, in a terminal: one panel that is drawn over itself."""

from collections import deque
from collections.abc import Mapping

from rich.console import Console, ConsoleOptions, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from jaxdist.plan.explain import gib
from jaxdist.runtime.telemetry import PARTS, DeviceMemory

SPARKS = "▁▂▃▄▅▆▇█"
MOST_POINTS = 40  # of a curve
BAR = 24  # characters that stand for the whole of a step's time
COLOURS = {"step": "green", "input": "yellow", "evaluation": "blue", "checkpoint": "magenta", "checks": "cyan"}
COLOURS |= {"host": "red"}


class RunPanel:
    """What the last steps said. planned: bytes that the compiler plans a device; simulated: whether devices are."""

    def __init__(self, title: str, num_steps: int, planned: int | None, simulated: bool):
        self.title, self.num_steps, self.planned, self.simulated = title, num_steps, planned, simulated
        self._record: Mapping = {}
        self._memory: list[DeviceMemory] = []
        self._losses: deque[float] = deque(maxlen=MOST_POINTS)
        self._recent: deque[Mapping[str, float]] = deque(maxlen=20)  # laps
        self._held_out: float | None = None

    def update(self, record: Mapping, memory: list[DeviceMemory]) -> None:
        """A line of metrics.jsonl, and what the allocators say."""
        self._record, self._memory = record, memory
        self._losses.append(record["loss"])
        self._recent.append(record["seconds"])
        self._held_out = record.get("held_out_loss", self._held_out)

    @property
    def is_empty(self) -> bool:
        return not self._record

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.is_empty:
            yield Panel(Text("the first step is under way"), title=Text(self.title))
            return
        rows = Table.grid(padding=(0, 2), expand=True)
        rows.add_column(style="bold", no_wrap=True)
        rows.add_column(ratio=1)
        for name, text in self.rows():
            rows.add_row(name, text)
        yield Panel(rows, title=Text(self.title), subtitle=Text(self.left()), padding=(0, 1))

    def left(self) -> str:
        """Steps done, and how long the rest takes at the pace of the last ones."""
        done = self._record["step"]
        text = f"step {done:,} of {self.num_steps:,}"
        if len(self._recent) < 2 or done >= self.num_steps:
            return text
        pace = sum(lap["total"] for lap in self._recent) / len(self._recent)
        seconds = pace * (self.num_steps - done)
        minutes, rest = divmod(int(seconds), 60)
        return f"{text}, about {f'{minutes:,} min ' if minutes else ''}{rest} s left"

    def rows(self) -> list[tuple[str, Text]]:
        record = self._record
        held_out = "" if self._held_out is None else f"   held-out {self._held_out:.4f}"
        norms = sorted(record["grad_norms"].items(), key=lambda each: -each[1])
        shown = ", ".join(f"{name.removeprefix('blocks.')} {norm:.2g}" for name, norm in norms[:4])
        scale = f"   loss scale {record['loss_scale']:g}" if "loss_scale" in record else ""
        pace = f"{record['tokens_per_second']:,.0f} tokens/s   lr {record['lr']:.2e}{scale}{self._speed()}"
        return [
            ("loss", Text(f"{record['loss']:.4f}  {sparks(self._losses)}{held_out}")),
            ("pace", Text(pace)),
            ("gradient", Text(f"norm {record['grad_norm']:.3f}: {shown}")),
            ("time", self._times()),
            ("memory", Text(self._memory_text())),
        ]

    def _speed(self) -> str:
        if {"mfu", "hfu"} <= self._record.keys():
            return f"   MFU {self._record['mfu']:.1%}, HFU {self._record['hfu']:.1%}"
        return "   (simulated: no speed)" if self.simulated else ""

    def _times(self) -> Text:
        """A bar of where the last steps' time went."""
        means = {name: sum(lap[name] for lap in self._recent) for name in PARTS}
        total = sum(means.values()) or 1.0
        text, named = Text(), Text("  ")
        for name, seconds in sorted(means.items(), key=lambda each: -each[1]):
            share = seconds / total
            text.append("█" * round(BAR * share), style=COLOURS[name])
            if share >= 0.01:
                named.append(f"{name} {share:.0%}  ", style=COLOURS[name])
        return text + named

    def _memory_text(self) -> str:
        planned = "" if self.planned is None else f"the compiler planned {gib(self.planned)} a device"
        if not self._memory:
            return f"{planned}; simulated devices have no allocator to ask".lstrip("; ")
        worst = max(self._memory, key=lambda each: each.peak)
        return f"at most {gib(worst.peak)} of {gib(worst.limit)}, on rank {worst.rank}; {planned}".rstrip("; ")


def sparks(values) -> str:
    """A curve in one line: each value among the least and the most of them. What is not finite is a gap."""
    finite = [x for x in values if x - x == 0]
    if not finite:
        return ""
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join(SPARKS[round((x - low) / span * (len(SPARKS) - 1))] if x - x == 0 else " " for x in values)
