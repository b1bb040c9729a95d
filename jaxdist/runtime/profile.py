"""A profiler's trace of a few steps, and what it says: how long each device computed, sent, and waited for messages.

The trace opens in Perfetto and XProf. An event of a device names the instruction of the compiled program that ran;
which of those are collectives, and over which mesh axes, is read from that program's text.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax

from jaxdist.errors import ConfigError
from jaxdist.files import write_whole
from jaxdist.mesh import MeshShape
from jaxdist.plan.proof.compile import emitted_collectives
from jaxdist.runtime import processes

FOLDER = "profile"  # in a run's, with a folder for each process
SUMMARY = "times.json"
# Instructions that run others: their events span these.
OUTER = re.compile(r"(while|conditional|call|async-start)(\.\d+)?$")

Interval = tuple[float, float]


@dataclass(frozen=True)
class DeviceTimes:
    """Seconds of one device over the steps that were traced.

    span: from its first event to the end of its last. compute: in which it ran anything but a collective.
    communication: in which a collective was under way, by axes ("dp", or "replica, dp"). exposed: the part of these in
    which it computed nothing. idle: in which it did neither.
    """

    rank: int
    span: float
    compute: float
    communication: dict[str, float]
    exposed: dict[str, float]
    idle: float


@dataclass(frozen=True)
class Window:
    """The steps to trace, first and last, counted from 1."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> "Window":
        """START:END. Raises: ConfigError."""
        found = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text)
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            raise ConfigError(f"profile={text!r}", "must be START:END, the first and the last step", "Use 10:12")
        return cls(int(found[1]), int(found[2]))


def folder_of(out: Path) -> Path:
    """Where this process keeps its trace."""
    return out / FOLDER / f"{processes.index():04}"


def summarise(folder: Path, text: str, mesh: MeshShape, devices: Sequence[jax.Device]) -> list[DeviceTimes]:
    """The newest trace below a folder, of this process's devices in mesh order; also written beside it.

    text: of the compiled step. Raises: ConfigError where there is no trace, or it is cut short.
    """
    mine = {d.local_hardware_id: rank for rank, d in enumerate(devices) if d.process_index == jax.process_index()}
    found = device_times(read_events(folder), text, mesh, mine)
    write_whole(folder / SUMMARY, (json.dumps([asdict(each) for each in found], indent=2) + "\n").encode())
    return found


def read_events(folder: Path) -> list[dict]:
    """Raises: ConfigError."""
    files = sorted(folder.glob("plugins/profile/*/*.trace.json.gz"))
    if not files:
        raise ConfigError(f"the profile in {folder}", "there is no trace", "Profile the run again")
    try:
        return json.loads(gzip.decompress(files[-1].read_bytes()))["traceEvents"]
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error) as error:
        raise ConfigError(f"the trace {files[-1]}", "must not be cut or damaged", "Profile the run again") from error


def device_times(events: Iterable[dict], text: str, mesh: MeshShape, ranks: Mapping[int, int]) -> list[DeviceTimes]:
    """events: of a Chrome trace, in microseconds. ranks: of this process's devices, by their ordinal on the host."""
    axes_of = {each.name.lstrip("%"): ", ".join(each.axes) for each in emitted_collectives(text, mesh)}
    events = list(events)
    computes: dict[int, list] = {rank: [] for rank in ranks.values()}
    sends: dict[int, dict] = {}
    ordinals = _ordinals(events)
    for event in events:
        instruction = event.get("args", {}).get("hlo_op") if event.get("ph") == "X" else None
        if instruction is None or OUTER.match(instruction):
            continue
        ordinal = event["args"].get("device_ordinal", ordinals.get(event.get("pid")))
        rank = ranks.get(int(ordinal)) if ordinal is not None else None
        if rank is None:
            continue
        interval = event["ts"] / 1e6, (event["ts"] + event.get("dur", 0)) / 1e6
        axes = axes_of.get(_begun_by(instruction))
        (computes[rank] if axes is None else sends.setdefault(rank, {}).setdefault(axes, [])).append(interval)
    return [_times(rank, computes[rank], sends.get(rank, {})) for rank in sorted(computes)]


def _ordinals(events: Iterable[dict]) -> dict[object, int]:
    """The ordinal of the device whose events have a pid, where the trace names processes after devices."""
    found = {}
    for event in events:
        names_process = event.get("ph") == "M" and event.get("name") == "process_name"
        device = names_process and re.fullmatch(r"/device:\w+:(\d+).*", str(event.get("args", {}).get("name")))
        if device:
            found[event.get("pid")] = int(device[1])
    return found


def _begun_by(instruction: str) -> str:
    """A collective's end is an event of its start: all-reduce-done.3 of all-reduce-start.3."""
    return instruction.replace("-done", "-start")


def _times(rank: int, computes: list[Interval], sends: Mapping[str, list[Interval]]) -> DeviceTimes:
    busy, everything = union(computes), union([*computes, *(each for found in sends.values() for each in found)])
    if not everything:
        return DeviceTimes(rank, 0.0, 0.0, {}, {}, 0.0)
    span = everything[-1][1] - everything[0][0]
    whole = {axes: union(found) for axes, found in sends.items()}
    return DeviceTimes(
        rank=rank,
        span=span,
        compute=length(busy),
        communication={axes: length(found) for axes, found in whole.items()},
        exposed={axes: length(found) - length(overlap(found, busy)) for axes, found in whole.items()},
        idle=span - length(everything),
    )


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time in intervals that do not overlap, in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def overlap(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """The intersection of two unions."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def described(found: Sequence[DeviceTimes], steps: int) -> str:
    """One sentence about the device that waited longest for messages, a mean step of the trace."""
    worst = max(found, key=lambda each: sum(each.exposed.values()))
    each_ms = 1e3 / steps
    sent = "; ".join(
        f"{axes} {seconds * each_ms:.2f} ms, {worst.exposed[axes] * each_ms:.2f} ms of it exposed"
        for axes, seconds in sorted(worst.communication.items(), key=lambda item: -item[1])
    )
    return (
        f"rank {worst.rank}, a step: compute {worst.compute * each_ms:.2f} ms, communication over "
        f"{sent or 'nothing'}, idle {worst.idle * each_ms:.2f} ms"
    )
