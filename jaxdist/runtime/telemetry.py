"""What one process measures of a step: where its time went, what its devices hold; and all processes beside each other.

Nothing here waits for a device: clocks of the host around what the run does anyway, and the allocators' own counters.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import jax

# Of the time between two lines of metrics.jsonl. input: waiting for the batch. step: from its start until its numbers
# are there. host: what is left.
PARTS = ("input", "step", "evaluation", "checkpoint", "checks", "host")


class Stopwatch:
    """Seconds by part since the last lap, on one host."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock, self._begun, self._parts = clock, clock(), dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time spent inside counts as `name`, one of PARTS. Parts do not overlap."""
        begun = self._clock()
        try:
            yield
        finally:
            self._parts[name] += self._clock() - begun

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Time spent inside counts nowhere: it is of the measuring."""
        begun = self._clock()
        try:
            yield
        finally:
            self._begun += self._clock() - begun

    def lap(self) -> dict[str, float]:
        """Seconds of each part since the last lap, and "total"; `host` is what no part was about."""
        now = self._clock()
        total, found = now - self._begun, self._parts
        self._begun, self._parts = now, dict.fromkeys(PARTS, 0.0)
        found["host"] += max(0.0, total - sum(found.values()))
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
