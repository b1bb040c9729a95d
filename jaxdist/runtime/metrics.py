"""What a run leaves on disk: its configuration, one JSON object a step, and a summary once it is complete."""

import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

from jaxdist.config import RunConfig, to_dict
from jaxdist.errors import ConfigError, reason_of
from jaxdist.files import read_object, read_regular, set_aside, write_whole
from jaxdist.runtime import processes

MOST_BYTES = 2**32  # of a file of a run that is read again
CONFIG, METRICS, SUMMARY, STOPPED = "config.json", "metrics.jsonl", "summary.json", "stopped.json"
PROCESSES = "processes"  # the folder with a file of lines for each process


class StepLines:
    """A file with a line of JSON for every step, appended as the run goes; lines of steps after `steps` are dropped.

    warn: is told of a file that is damaged. It is kept under another name, and its good lines stay. failure: why the
    disk refused the last line, if it did. Raises: OSError where it cannot be opened.
    """

    def __init__(self, path: Path, steps: int, warn: Callable[[str], None]):
        self.path, self.failure, self._warn, self._file = path, None, warn, None
        self.go_back(steps)

    def go_back(self, steps: int) -> None:
        """Keep the lines of the first `steps` steps, and write on from there."""
        self.close()
        lines, damage = read_metrics(self.path)
        kept = b"".join(line + b"\n" for step, line in lines if step <= steps)
        if damage:
            aside = set_aside(self.path, "damaged")
            self._warn(f"{self.path} is damaged: {damage}. It is kept as {aside.name}; {len(lines)} good lines stay")
        write_whole(self.path, kept)
        self._file = self.path.open("ab", buffering=0)

    def write(self, record: dict) -> bool:
        """Append one line; a number JSON has no word for (the infinite norm of a step fp16 skipped) becomes null.

        False where the disk refuses it (`failure` says why): a run is worth more than its metrics.
        """
        line = (json.dumps(_finite(record), allow_nan=False) + "\n").encode()
        size = self._file.tell()
        try:
            if self._file.write(line) == len(line):
                return True
            self.failure = "the disk took half a line"
        except OSError as error:
            self.failure = error.strerror
        self._file.truncate(size)
        self._file.seek(size)
        return False

    def close(self) -> None:
        if self._file:
            self._file.close()


def process_lines(out: Path, steps: int, warn: Callable[[str], None]) -> StepLines:
    """The file of this process in a run's folder. Raises: ConfigError where it cannot be written."""
    try:
        (out / PROCESSES).mkdir(parents=True, exist_ok=True)
        return StepLines(out / PROCESSES / f"{processes.index():04}.jsonl", steps, warn)
    except OSError as error:
        raise _unwritable(out, error) from error


def _finite(value):
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class RunFiles:
    """`config.json` and `metrics.jsonl` in a folder, written as the run goes; `summary.json` only at its end.

    A folder without `summary.json` is a run that did not finish. With `out` None nothing is written.

    Args:
        steps: the steps done before; lines of later ones are dropped from `metrics.jsonl`, since they come again.
        warn: is told of a `metrics.jsonl` that is damaged. It is kept under another name, and its good lines stay.

    Raises: ConfigError where the folder cannot be written.
    """

    def __init__(
        self,
        out: Path | None,
        config: RunConfig,
        extra: dict,
        steps: int = 0,
        warn: Callable[[str], None] = lambda text: None,
    ):
        self.folder, self._lines, self._failure = out, None, None
        self._config = {**to_dict(config), **extra}
        if out is None:
            return
        try:
            out.mkdir(parents=True, exist_ok=True)
            for name in (SUMMARY, STOPPED):
                (out / name).unlink(missing_ok=True)
            self._write(CONFIG, self._config)
            self._lines = StepLines(out / METRICS, steps, warn)
        except OSError as error:
            raise _unwritable(out, error) from error

    @property
    def failure(self) -> str | None:
        """Why the disk refused what was written last."""
        return self._failure or (self._lines.failure if self._lines else None)

    def go_back(self, steps: int) -> None:
        """Keep the lines of the first `steps` steps, and write on from there."""
        if self._lines:
            self._lines.go_back(steps)

    def write_step(self, record: dict) -> bool:
        """Append one line; False where the disk refuses it."""
        return self._lines is None or self._lines.write(record)

    def add_to_config(self, facts: dict) -> bool:
        """Add facts that are known only later, such as what the compiled step needs. False where the disk refuses
        it."""
        self._config |= facts
        return self._try_to_write(CONFIG, self._config)

    def write_summary(self, summary: dict) -> bool:
        """False where the disk refuses it."""
        return self._try_to_write(SUMMARY, summary)

    def write_stopped(self, stopped: dict) -> bool:
        """`stopped.json`, in place of a summary: the run ended by itself, before its last step."""
        return self._try_to_write(STOPPED, stopped)

    def _try_to_write(self, name: str, content: dict) -> bool:
        try:
            self._write(name, content)
        except OSError as error:
            self._failure = error.strerror
            return False
        return True

    def _write(self, name: str, content: dict) -> None:
        if self.folder:
            write_whole(self.folder / name, (json.dumps(content, indent=2) + "\n").encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        if self._lines:
            self._lines.close()


def holds_run(out: Path) -> bool:
    return (out / METRICS).exists()


def is_complete(out: Path) -> bool:
    return (out / SUMMARY).exists()


def read_config(out: Path) -> dict:
    """The configuration of the run in a folder. Raises: ConfigError where there is none that can be read."""
    return read_object(
        out / CONFIG,
        MOST_BYTES,
        lambda why: ConfigError(f"out={str(out)!r}", f"{CONFIG} must be whole: {why}", "Choose another folder"),
    )


def require_writable_folder(out: Path) -> None:
    """Raises: ConfigError where a run could not be written there. Nothing is made yet."""
    there = out
    try:
        while not there.exists():
            there = there.parent
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "not a folder")
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "permission denied")
    except OSError as error:
        raise _unwritable(out, error) from error


def _unwritable(out: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"out={str(out)!r}", f"it cannot be written ({error.strerror})", "Name a folder that you may write"
    )


def read_metrics(path: Path) -> tuple[list[tuple[int, bytes]], str]:
    """(step and text of every good line in order, what is wrong with the file or "").

    Half a line at the end is no damage: a process that was killed leaves it.
    """
    try:
        *whole, _ = read_regular(path, MOST_BYTES).split(b"\n")
    except FileNotFoundError:
        return [], ""
    except OSError as error:
        return [], reason_of(error)
    lines, bad, last = [], [], 0
    for number, line in enumerate(whole, start=1):
        step = _step_of(line)
        if step is None or step <= last:
            bad.append(number)
        else:
            lines.append((step, line))
            last = step
    others = f" and {len(bad) - 1} other lines are" if len(bad) > 1 else " is"
    return lines, f"line {bad[0]}{others} not the record of a next step" if bad else ""


def _step_of(line: bytes) -> int | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if type(step) is int else None
