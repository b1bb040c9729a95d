"""What a run leaves on disk: its configuration, one JSON object a step, and a summary once it is complete."""

import errno
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from jaxdist.config import RunConfig, to_dict
from jaxdist.errors import ConfigError
from jaxdist.files import write_whole

CONFIG, METRICS, SUMMARY, STOPPED = "config.json", "metrics.jsonl", "summary.json", "stopped.json"


class RunFiles:
    """`config.json` and `metrics.jsonl` in a folder, written as the run goes; `summary.json` only at its end.

    A folder without `summary.json` is a run that did not finish. With `out` None nothing is written.

    Args:
        steps: the steps done before; lines of later ones are dropped from `metrics.jsonl`, since they come again.

    Raises: ConfigError where the folder cannot be written.
    """

    def __init__(self, out: Path | None, config: RunConfig, extra: dict, steps: int = 0):
        self.folder, self._metrics, self.failure = out, None, None
        if out is None:
            return
        try:
            out.mkdir(parents=True, exist_ok=True)
            for name in (SUMMARY, STOPPED):
                (out / name).unlink(missing_ok=True)
            self._write(CONFIG, {**to_dict(config), **extra})
            self.go_back(steps)
        except OSError as error:
            raise _unwritable(out, error) from error

    def go_back(self, steps: int) -> None:
        """Keep the lines of the first `steps` steps, and write on from there."""
        if self.folder is None:
            return
        if self._metrics:
            self._metrics.close()
        path = self.folder / METRICS
        kept = "".join(line + "\n" for line, record in _lines(path) if record["step"] <= steps)
        write_whole(path, kept.encode())
        self._metrics = path.open("ab", buffering=0)

    def write_step(self, record: dict) -> bool:
        """Append one line; a number JSON has no word for (the infinite norm of a step fp16 skipped) becomes null.

        False where the disk refuses it (`failure` says why): a run is worth more than its metrics.
        """
        if self._metrics is None:
            return True
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        line = (json.dumps(finite, allow_nan=False) + "\n").encode()
        size = self._metrics.tell()
        try:
            if self._metrics.write(line) == len(line):
                return True
            self.failure = "the disk took half a line"
        except OSError as error:
            self.failure = error.strerror
        self._metrics.truncate(size)
        self._metrics.seek(size)
        return False

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
            self.failure = error.strerror
            return False
        return True

    def _write(self, name: str, content: dict) -> None:
        if self.folder:
            write_whole(self.folder / name, (json.dumps(content, indent=2) + "\n").encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        if self._metrics:
            self._metrics.close()


def holds_run(out: Path) -> bool:
    return (out / METRICS).exists()


def is_complete(out: Path) -> bool:
    return (out / SUMMARY).exists()


def read_config(out: Path) -> dict:
    """The configuration of the run in a folder. Raises: ConfigError where there is none that can be read."""
    path = out / CONFIG
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"--out {out}", f"{path} cannot be read ({error.strerror})", "Choose another folder"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--out {out}", f"{path} is not JSON", "Choose another folder") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--out {out}", f"{path} is no configuration", "Choose another folder")
    return content


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
    return ConfigError(f"--out {out}", f"it cannot be written ({error.strerror})", "Name a folder that you may write")


def _lines(path: Path) -> Iterator[tuple[str, dict]]:
    """The whole lines of a metrics file; a process that was killed may have left half a line at its end."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            return
        yield line, record
