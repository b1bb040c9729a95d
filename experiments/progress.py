"""How far work is, said on stderr once it takes longer than a moment: one line on a terminal, lines elsewhere."""

import os
import sys
import threading
import time
from typing import Self, TextIO

AFTER = 5.0  # seconds of silence
EVERY = 15.0  # between lines, where there is no terminal


class Progress:
    """A context around slow work. `update` says how many of how many are done, and the rest of the time follows.

    A thread writes, so that work which never calls `update` (a compiler) is shown too.
    """

    def __init__(
        self, what: str, stream: TextIO | None = None, after: float = AFTER, every: float = EVERY, quiet: bool = False
    ):
        """quiet: say nothing, on a process that is not the first."""
        self.what, self.stream = what, stream or sys.stderr
        self.after, self.every = None if quiet else after, 0.5 if self.stream.isatty() else every
        self.done, self.total = 0, None
        self._ended, self._width = threading.Event(), 0

    def update(self, done: int, total: int) -> None:
        self.done, self.total = done, total

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._ended.set()
        self._thread.join()
        if self._width:
            self._write("\r" + " " * self._width + "\r")

    def line(self) -> str:
        elapsed = time.monotonic() - self._start
        if not self.total:
            return f"{self.what}: {elapsed:.0f} s so far"
        left = f", about {elapsed / self.done * (self.total - self.done):.0f} s left" if self.done else ""
        return f"{self.what}: {self.done:,} of {self.total:,}{left}"

    def _run(self) -> None:
        wait = self.after
        while not self._ended.wait(wait):
            text = self.line()
            if self.stream.isatty():
                text = text[: self._columns() - 1]  # a line that wraps cannot be taken back
                self._write("\r" + text.ljust(self._width))
                self._width = max(self._width, len(text))
            else:
                self._write(text + "\n")
            wait = self.every

    def _columns(self) -> int:
        """The terminal's width; no limit where that is not known."""
        try:
            return os.get_terminal_size(self.stream.fileno()).columns or sys.maxsize
        except (OSError, ValueError):
            return sys.maxsize

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()
