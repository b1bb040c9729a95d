"""Deferred signal handling: a job stops by itself between two steps. No JAX here, for programs that only wait."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Self

EXIT_SIGNAL = 128  # plus the number of the signal that stopped it, as shells have it


class Signals:
    """A context that keeps the first signal in `self.number`, for the job to stop by itself; the next ends it at once.

    With `grace` (seconds) the process ends by itself that long after the first one, done or not, after `late` has
    said so. A signal that was ignored when the context began, as under nohup, stays ignored.
    """

    def __init__(
        self,
        numbers: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT),
        grace: float | None = None,
        late: Callable[[], None] = lambda: None,
    ):
        self.number: int | None = None
        self.ignored = False  # set where the job must not be interrupted any more
        self._numbers, self._grace, self._late, self._before = numbers, grace, late, {}
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._keep)
        return self

    def _keep(self, number: int, frame) -> None:
        if self.ignored:
            return
        if self.number is not None:
            raise SystemExit(EXIT_SIGNAL + number)
        self.number = number
        if self._grace is not None:
            self._timer = threading.Timer(self._grace, self._end)
            self._timer.daemon = True
            self._timer.start()

    def _end(self) -> None:
        self._late()
        os._exit(EXIT_SIGNAL + self.number)

    @property
    def reason(self) -> str | None:
        return None if self.number is None else signal.Signals(self.number).name

    def __exit__(self, *_) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)
