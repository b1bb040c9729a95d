"""Deferred signal handling: a job stops by itself between two steps. No JAX here, for programs that only wait."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

EXIT_SIGNAL = 128  # plus the number of the signal that stopped it, as shells have it


def use_default_sigint() -> None:
    """Until `Interrupts` begins, Ctrl-C ends the process at once: imports take seconds, and what an exception in one of
    them says helps nobody."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _leave_interrupts_out(unraisable) -> None:
    if unraisable.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(unraisable)


class Interrupts:
    """A context that Ctrl-C ends by KeyboardInterrupt, also where Python drops the first one.

    What a callback of the garbage collector raises is printed and forgotten (JAX has one), so it is raised again until
    the context has ended. A SIGINT that was ignored when the context began, as under nohup, stays ignored.
    """

    AGAIN_SECONDS = 2.0

    def __init__(self):
        self._ended, self._repeats = threading.Event(), None

    def __enter__(self) -> Self:
        ours = signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_DFL)
        if ours and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._interrupt)
        return self

    def _interrupt(self, number: int, frame) -> None:
        if self._repeats is None:
            self._repeats = threading.Thread(target=self._repeat, daemon=True)
            self._repeats.start()
            sys.unraisablehook = _leave_interrupts_out
        raise KeyboardInterrupt

    def _repeat(self) -> None:
        while not self._ended.wait(self.AGAIN_SECONDS):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # also where it waits or sleeps

    def __exit__(self, *_) -> None:
        self._ended.set()
        if sys.unraisablehook is _leave_interrupts_out:
            sys.unraisablehook = sys.__unraisablehook__
        if signal.getsignal(signal.SIGINT) == self._interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)


class Signals:
    """A context that keeps the first signal in `self.number`, for the job to stop by itself; the next ends it at once.

    With `grace` (seconds) the process ends by itself that long after the first one, done or not, after `late` has
    said so. `heard` is called with the first one's name, in a thread: the job itself may be compiling, and hear of it
    only then. A signal that was ignored when the context began, as under nohup, stays ignored.
    """

    def __init__(
        self,
        numbers: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
        grace: float | None = None,
        late: Callable[[], None] = lambda: None,
        heard: Callable[[str], None] | None = None,
    ):
        self.number: int | None = None
        self.ignored = False  # set where the job must not be interrupted any more
        self._numbers, self._grace, self._late = numbers, grace, late
        self._before: dict = {}
        self._timer: threading.Timer | None = None
        self._heard, self._other_pipe = heard, -1
        self._pipe: tuple[int, ...] = ()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._keep)
            if self._heard is not None:
                self._listen(self._heard)
        return self

    def _listen(self, heard: Callable[[str], None]) -> None:
        """Python writes a signal's number to a pipe as it comes, and calls handlers when its main thread is free."""
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._other_pipe = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)

        def listen() -> None:
            said = False
            while numbers := os.read(self._pipe[0], 1):
                if numbers[0] in self._before and not (said or self.ignored):
                    said = True
                    with suppress(OSError):  # its terminal may be gone
                        heard(signal.Signals(numbers[0]).name)
            os.close(self._pipe[0])

        threading.Thread(target=listen, daemon=True).start()

    def _keep(self, number: int, frame) -> None:
        if self.ignored:
            return
        if self.number is not None:
            if number == signal.SIGHUP:  # of one closed terminal the kernel and the shell each send one
                return
            raise SystemExit(EXIT_SIGNAL + number)
        self.number = number
        if self._grace is not None:
            self._timer = threading.Timer(self._grace, self._end, (number,))
            self._timer.daemon = True
            self._timer.start()

    def ask(self, number: int) -> None:
        """As if that signal had come."""
        if self.number is None:
            self.number = number

    def _end(self, number: int) -> None:
        with suppress(OSError):
            self._late()
        os._exit(EXIT_SIGNAL + number)

    @property
    def reason(self) -> str | None:
        return None if self.number is None else signal.Signals(self.number).name

    def __exit__(self, *_) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._pipe:
            signal.set_wakeup_fd(self._other_pipe)
            os.close(self._pipe[1])  # by which the thread ends, that reads the other end
