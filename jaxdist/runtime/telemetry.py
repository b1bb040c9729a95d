"""What one process measures of a step: where its time went, what its devices hold; and all processes beside each other.

Nothing here waits for a device: clocks of the host around what the run does anyway, and the allocators' own counters.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import jax

# Of the time between two lines of metrics.jsonl. input: waiting for the batch. step: while devices run it, when nothing
# else counts. host: what is left.
PARTS = ("input", "step", "evaluation", "checkpoint", "checks", "host")


class Span(NamedTuple):
    """A part of a lap, or ASIDE, and when it began and ended by the stopwatch's clock, in seconds."""

    name: str
    begun: float
    ended: float

    def between(self, begun: float, ended: float) -> float:
        """Seconds of it between two times."""
        return max(0.0, min(self.ended, ended) - max(self.begun, begun))


ASIDE = "aside"  # of the measuring: counts nowhere


class Stopwatch:
    """Seconds by part since the last lap, on one host whose devices run a step meanwhile."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.now, self._begun = clock, clock()
        self._spans: list[Span] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time spent inside counts as `name`, one of PARTS or ASIDE, but for what devices run meanwhile. Parts of the
        host do not overlap."""
        begun = self.now()
        try:
            yield
        finally:
            self.add(name, begun, self.now())

    def add(self, name: str, begun: float, ended: float) -> Span:
        """Count the time between two readings of the clock, none before the last lap's end, as `name`."""
        if name not in (*PARTS, ASIDE):
            raise KeyError(name)
        self._spans.append(Span(name, begun, ended))
        return self._spans[-1]

    def lap(self, ended: float | None = None) -> dict[str, float]:
        """Seconds of each part since the last lap, and "total"; `host` is what no part was about.

        ended: when the lap ends, now if None; what is later is the next one's.
        """
        begun, ended = self._begun, self.now() if ended is None else ended
        steps = [span for span in self._spans if span.name == "step"]
        found = dict.fromkeys((*PARTS, ASIDE), 0.0)
        for span in self._spans:
            first, last = max(span.begun, begun), min(span.ended, ended)
            hidden = 0.0 if span.name == "step" else sum(step.between(first, last) for step in steps)
            found[span.name] += max(0.0, last - first - hidden)
        total = ended - begun - found.pop(ASIDE)
        found["host"] += max(0.0, total - sum(found.values()))
        self._begun, self._spans = ended, [span for span in self._spans if span.ended > ended]
        return {**found, "total": total}


class Spread(NamedTuple):
    """One quantity of all processes: the least, the median, the most, and which process has the most."""

    least: float
    median: float
    most: float
    process: int


def spreads(found: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """What every process says, in their order -> by name."""
    columns = {name: [each[name] for each in found] for name in found[0]}
    return {
        name: Spread(min(column), statistics.median(column), max(column), column.index(max(column)))
        for name, column in columns.items()
    }


class MeanLap:
    """The mean of every part over all laps so far, without keeping them."""

    def __init__(self):
        self._count, self._sums = 0, {}

    def add(self, lap: Mapping[str, float]) -> None:
        self._count += 1
        self._sums = {name: self._sums.get(name, 0.0) + seconds for name, seconds in lap.items()}

    def __bool__(self) -> bool:
        return self._count > 0

    def mean(self) -> dict[str, float]:
        """Mean seconds of each part, over at least one step."""
        return {name: seconds / self._count for name, seconds in self._sums.items()}


class DeviceMemory(NamedTuple):
    """Bytes of one device: what it holds now, and the most it held since the process began."""

    rank: int
    in_use: int
    peak: int
    limit: int


def device_memory(devices: Sequence[jax.Device]) -> list[DeviceMemory]:
    """Memory of this process's devices, by their allocators, with their ranks in mesh order. Simulated devices share
    the host's memory and have no allocator of their own: they are left out."""
    found = []
    for rank, device in enumerate(devices):
        stats = device.memory_stats() if device.process_index == jax.process_index() else None
        if stats and "peak_bytes_in_use" in stats:
            numbers = (stats[name] for name in ("bytes_in_use", "peak_bytes_in_use", "bytes_limit"))
            found.append(DeviceMemory(rank, *map(int, numbers)))
    return found
