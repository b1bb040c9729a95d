"""A run's folder as columns of numbers, whatever state it is in: finished, still written, damaged, of another version.

Nothing in the folder is trusted: what cannot be read is left out, and `Run.notes` says so.
"""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxdist.errors import ConfigError, is_utf8, printable
from jaxdist.files import read_object
from jaxdist.runtime.metrics import CONFIG, METRICS, MOST_BYTES, PROCESSES, STOPPED, SUMMARY, read_metrics
from jaxdist.runtime.telemetry import PARTS, DeviceMemory, Spread, spreads

State = Literal["complete", "stopped", "not finished"]
Column = np.ndarray  # float64, one number a step; NaN where the file has none

NUMBERS = ("loss", "held_out_loss", "grad_norm", "lr", "tokens", "tokens_per_second", "loss_scale")
MOST_NAMES = 1000  # of columns, so that a damaged file cannot make more


@dataclass(frozen=True, eq=False)
class ProcessLines:
    """What one process measured, in the steps that all have.

    memory: of its devices that have an allocator, after its last step, with the most of every step as the peak.
    """

    index: int
    seconds: dict[str, Column]
    memory: list[DeviceMemory]


@dataclass(frozen=True, eq=False)
class Run:
    """What a run has left in its folder.

    config: of config.json, as it stands. steps: of the columns' rows. numbers, grad_norms, seconds: columns by name, by
    group and by part (`telemetry.PARTS` and "total"). exchanged: what the processes told each other, by step and part.
    end: what summary.json or stopped.json says. notes: what is missing, damaged or unknown, a sentence each.
    """

    folder: Path
    config: dict[str, Any]
    state: State
    steps: np.ndarray
    numbers: dict[str, Column]
    grad_norms: dict[str, Column]
    seconds: dict[str, Column]
    exchanged: dict[int, dict[str, Spread]]
    processes: list[ProcessLines]
    end: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    def column(self, name: str) -> tuple[np.ndarray, Column]:
        """(steps, values) of the steps that have a finite value of this name."""
        values = self.numbers.get(name, np.empty(0))
        there = np.isfinite(values)
        return self.steps[there] if there.size else self.steps[:0], values[there]

    def last(self, name: str) -> float | None:
        """The newest finite value of a column."""
        _, values = self.column(name)
        return float(values[-1]) if values.size else None

    def mean_seconds(self) -> dict[str, float]:
        """Mean seconds of each part, over all steps; parts that no step has are left out."""
        return _means(self.seconds)

    def laps(self) -> list[dict[str, float]]:
        """The mean seconds of every part, of each process that tells all of them; else of the first one's lines."""
        found = [_means(each.seconds) for each in self.processes] or [self.mean_seconds()]
        return [lap for lap in found if set(PARTS) <= lap.keys()]

    def spread_over_processes(self) -> dict[str, Spread]:
        """The mean seconds of each part on every process beside each other; empty where fewer than two are known."""
        means = {each.index: _means(each.seconds) for each in self.processes}
        means = {index: found for index, found in means.items() if found}
        if len(means) < 2:
            return {}
        shared = set.intersection(*(set(found) for found in means.values()))
        indices = sorted(means)
        found = spreads([{name: means[index][name] for name in sorted(shared)} for index in indices])
        return {name: each._replace(process=indices[each.process]) for name, each in found.items()}

    def memory(self) -> list[DeviceMemory]:
        """Memory of every device that an allocator was asked about, by rank."""
        return sorted(each for process in self.processes for each in process.memory)


def read_run(folder: Path) -> Run:
    """The run in a folder. Raises: ConfigError where the folder is none, or holds neither config.json nor metrics."""
    if not any(os.path.isfile(folder / name) for name in (CONFIG, METRICS)):
        raise ConfigError(
            f"the run {str(folder)!r}",
            f"must be a folder with {CONFIG} or {METRICS} in it",
            "Name what `train --out` was given",
        )
    notes: list[str] = []
    config = _read_object(folder / CONFIG, notes)
    lines = _Lines(folder / METRICS, METRICS, notes)
    numbers = {name: values for name in NUMBERS if (values := lines.column(name)) is not None}
    state, end = _end_of(folder, notes)
    columns = lines.steps, numbers, lines.nested("grad_norms"), lines.parts(), _exchanged(lines)
    return Run(folder, config, state, *columns, _read_processes(folder / PROCESSES, notes), end, notes)


def labels(folders: Sequence[Path]) -> list[str]:
    """A name for each of several folders: its last part, or the whole path where two end alike."""
    names = [folder.absolute().name for folder in folders]
    return [
        printable(name if names.count(name) == 1 else str(folder)) for name, folder in zip(names, folders, strict=True)
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------


def _read_object(path: Path, notes: list[str]) -> dict[str, Any]:
    """A JSON object; empty, with a note, where there is none."""
    try:
        return read_object(path, MOST_BYTES, ValueError)
    except ValueError as error:
        notes.append(f"{path.name}: {error}")
    return {}


def _end_of(folder: Path, notes: list[str]) -> tuple[State, dict]:
    names: dict[str, State] = {SUMMARY: "complete", STOPPED: "stopped"}
    for name, state in names.items():
        if (folder / name).exists():
            return state, _read_object(folder / name, notes)
    notes.append(f"neither {SUMMARY} nor {STOPPED} is there: the run goes on, or was ended from outside")
    return "not finished", {}


class _Lines:
    """The good lines of a file with one JSON object a step, as columns."""

    def __init__(self, path: Path, name: str, notes: list[str]):
        self._name, self._notes = name, notes
        found, damage = read_metrics(path)
        if damage:
            notes.append(f"{name} is damaged: {damage}; its other {len(found)} lines are shown")
        elif not found:
            notes.append(f"{name} has no whole line" if path.exists() else f"there is no {name}")
        in_range = [(step, line) for step, line in found if 0 <= step < 2**53]
        self.steps = np.array([step for step, _ in in_range], np.int64)
        self.records: list[dict] = [json.loads(line) for _, line in in_range]

    def column(self, name: str) -> Column | None:
        """One number of every line; None where no line has it."""
        return self._column(name, [record.get(name) for record in self.records])

    def nested(self, name: str) -> dict[str, Column]:
        """The columns of an object in every line."""
        found = (record.get(name) for record in self.records)
        tables = [table if isinstance(table, dict) else {} for table in found]
        inner = list(dict.fromkeys(key for table in tables for key in table))[:MOST_NAMES]
        found = {key: self._column(f"{name}.{key}", [table.get(key) for table in tables]) for key in inner}
        return {key: values for key, values in found.items() if values is not None and is_utf8(key)}

    def parts(self) -> dict[str, Column]:
        """Seconds of the parts of a step that this version knows."""
        found = self.nested("seconds")
        return {part: found[part] for part in (*PARTS, "total") if part in found}

    def _column(self, name: str, values: list) -> Column | None:
        there = [value for value in values if value is not None]
        numbers = np.array([_number(value) for value in values])
        bad = sum(not _is_number(value) for value in there)
        if bad:
            self._notes.append(f"{self._name}: {name} is no number in {bad} of {len(values)} lines, left out")
        if name in ("loss", "grad_norm") and (gone := len(values) - len(there)) and there:
            self._notes.append(f"{self._name}: {name} was not finite, or is not said, in {gone} of {len(values)} steps")
        return numbers if len(there) > bad else None


def _is_number(value) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300


def _number(value) -> float:
    return float(value) if _is_number(value) else math.nan


# ---------------------------------------------------------------------------------------------------------------------
# Parts of a step, and processes
# ---------------------------------------------------------------------------------------------------------------------


def _means(columns: Mapping[str, Column]) -> dict[str, float]:
    return {name: float(np.nanmean(values)) for name, values in columns.items() if np.isfinite(values).any()}


def _exchanged(lines: _Lines) -> dict[int, dict[str, Spread]]:
    found = {}
    for step, record in zip(lines.steps.tolist(), lines.records, strict=True):
        table = record.get("processes")
        parts = {} if not isinstance(table, dict) else {part: _spread(each) for part, each in table.items()}
        if parts := {part: each for part, each in parts.items() if each and part in (*PARTS, "total")}:
            found[step] = parts
    return found


def _spread(value) -> Spread | None:
    if not isinstance(value, dict) or not all(_is_number(value.get(name)) for name in Spread._fields):
        return None
    return Spread(*(value[name] for name in Spread._fields))


def _read_processes(folder: Path, notes: list[str]) -> list[ProcessLines]:
    files = {int(path.stem): path for path in folder.glob("*.jsonl") if re.fullmatch(r"\d{4,9}", path.stem, re.ASCII)}
    if not files:
        notes.append(f"there is no file of a process in {PROCESSES}/: no times of each process, no memory of devices")
    read = {index: _Lines(path, f"{PROCESSES}/{path.name}", notes) for index, path in sorted(files.items())}
    first = next((int(lines.steps[-1]) for lines in read.values() if lines.steps.size), 0)
    for index, lines in [*read.items()]:
        if lines.steps.size and abs(int(lines.steps[-1]) - first) > 1:  # one that ends with the run may lack a step
            last = f"ends at step {lines.steps[-1]} and the first process at {first}"
            notes.append(f"{PROCESSES}/{files[index].name} {last}: the run goes on without it, and it is left out")
            del read[index]
    steps = [lines.steps for lines in read.values() if lines.steps.size]
    shared = reduce(np.intersect1d, steps) if steps else np.empty(0)  # others are no measure of one against another
    found = []
    for index, lines in read.items():
        seconds = {part: values[np.isin(lines.steps, shared)] for part, values in lines.parts().items()}
        found.append(ProcessLines(index, seconds, _memory(lines.records)))
    return found


def _memory(records: list[dict]) -> list[DeviceMemory]:
    """By rank: the newest of each device, with the largest peak that any line has."""
    found: dict[int, DeviceMemory] = {}
    for record in records:
        for each in record["memory"] if isinstance(record.get("memory"), list) else ():
            if not isinstance(each, dict) or not all(type(each.get(name)) is int for name in DeviceMemory._fields):
                continue
            memory = DeviceMemory(*(each[name] for name in DeviceMemory._fields))
            before = found.get(memory.rank, memory)
            found[memory.rank] = memory._replace(peak=max(memory.peak, before.peak))
    return list(found.values())
