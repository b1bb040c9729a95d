"""When a run must end before its last step: agreement between processes, and what no step can notice.

Everything here works outside of the devices, since a collective that waits for a rank which never comes cannot.
"""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from typing import Self, TextIO

import jax

from jaxdist.compat import coordination_client
from jaxdist.runtime import processes

EXIT_STUCK = 70
FALLBACK_SECONDS = 5
OTHERS_SECONDS = 10  # in which every other process has noticed as well, or its fallback has


class Agreement:
    """The step before which all processes stop, once any of them wants to.

    Each asks before it starts a step, with at most one other not finished. One that wants to stop says so before it
    starts step s, and all stop before step s + 2: no other process can finish step s without it, so each reads the
    message in time.
    """

    def __init__(self):
        self._said = False

    def stop_reason(self, step: int, mine: tuple[str, int] | None) -> tuple[str, int] | None:
        """Why this process must not start `step` and the exit code for it, or None; `mine` is its own wish."""
        if jax.process_count() == 1:
            return mine
        client, index = coordination_client(), jax.process_index()
        if mine is not None and not self._said:
            self._said = True
            reason, code = mine
            said = f"{step + 2} {code} process {index}: {reason}"
            client.key_value_set(f"jaxdist/stop/{index}", said, allow_overwrite=True)  # said before, and rolled back
        for _, text in client.key_value_dir_get("jaxdist/stop/"):
            last, code, reason = text.split(" ", 2)
            if step >= int(last):
                return reason, int(code)
        return None


class Watchdog:
    """Ends the process when no step has finished for `seconds`, after the stack of every thread is written down.

    A rank that waits in a collective for one that never comes is stuck as well, so every process ends by its own
    watchdog. The first to notice waits for the others to have written: JAX aborts them as soon as it is gone. Should
    even the watchdog be held up (by a lock of the interpreter), `faulthandler` ends the process FALLBACK_SECONDS later.
    """

    def __init__(self, seconds: float, where: str | None = None):
        self.seconds, self._where = seconds, where
        self._doing, self._deadline = "starting", None
        self._stop = threading.Event()

    def __enter__(self) -> Self:
        processes.start_guard("watchdog", self._watch)
        return self

    def alive(self, doing: str) -> None:
        """Progress was made; what comes next is `doing`."""
        self._doing, self._deadline = doing, time.monotonic() + self.seconds
        # The real standard error: what stands in for it (a notebook, a test) may have no file descriptor.
        faulthandler.dump_traceback_later(self.seconds + FALLBACK_SECONDS, exit=True, file=sys.__stderr__)

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self.seconds / 4)):
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._write(sys.__stderr__)
                if self._where is not None:
                    with contextlib.suppress(OSError), open(self._where, "a", encoding="utf-8") as file:
                        self._write(file)
                faulthandler.dump_traceback_later(2 * OTHERS_SECONDS, exit=True, file=sys.__stderr__)
                processes.end_together("stuck", OTHERS_SECONDS)
                os._exit(EXIT_STUCK)

    def _write(self, file: TextIO) -> None:
        print(
            f"process {jax.process_index()} is stuck: nothing was finished for {self.seconds:g} s while {self._doing}. "
            "The stack of every thread follows.",
            file=file,
            flush=True,
        )
        faulthandler.dump_traceback(file, all_threads=True)

    def __exit__(self, *_) -> None:
        self._stop.set()
        faulthandler.cancel_dump_traceback_later()
