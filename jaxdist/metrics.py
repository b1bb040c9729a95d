"""What a run leaves on disk: its configuration, one JSON object a step, and a summary once it is complete."""

import json
import math
from pathlib import Path
from typing import Self

from jaxdist.config import RunConfig, to_dict
from jaxdist.errors import ConfigError


class RunFiles:
    """`config.json` and `metrics.jsonl` in a folder, written as the run goes; `summary.json` only at its end.

    A folder without `summary.json` is a run that did not finish. With `out` None nothing is written.

    Raises: ConfigError where the folder cannot be written or holds a run already.
    """

    def __init__(self, out: str | None, config: RunConfig, extra: dict):
        self.folder = None if out is None else Path(out)
        self._metrics = None
        if self.folder is None:
            return
        try:
            holds_a_run = (self.folder / "metrics.jsonl").exists()
            if holds_a_run or not out:
                reason = "the folder holds a run already" if holds_a_run else "it names no folder"
                raise ConfigError(f"--out {out!r}", reason, "Choose another folder")
            self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps({**to_dict(config), **extra}, indent=2)
            (self.folder / "config.json").write_text(text + "\n", encoding="utf-8")
            self._metrics = (self.folder / "metrics.jsonl").open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--out {out}", f"it cannot be written ({error.strerror})", "Name a folder that you may write"
            ) from error

    def write_step(self, record: dict) -> None:
        """Append one line; a number JSON has no word for (the infinite norm of a step fp16 skipped) becomes null."""
        if self._metrics:
            finite = {k: v if math.isfinite(v) else None for k, v in record.items()}
            self._metrics.write(json.dumps(finite, allow_nan=False) + "\n")
            self._metrics.flush()

    def write_summary(self, summary: dict) -> None:
        self._write("summary.json", summary)

    def write_stopped(self, stopped: dict) -> None:
        """`stopped.json`, in place of a summary: the run ended by itself, before its last step."""
        self._write("stopped.json", stopped)

    def _write(self, name: str, content: dict) -> None:
        if self.folder:
            (self.folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        if self._metrics:
            self._metrics.close()
