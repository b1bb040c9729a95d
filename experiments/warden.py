"""Runs one command that cannot outlive the program that started it, nor a moment fixed at its start.

A process of its own stands between the program and its command: it kills the command's process group at the deadline
and as soon as the program is gone, whatever ended or stopped the program. Only the standard library is imported.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2), on Linux
HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Guarded:
    """The command of a program, in a process group of its own, under a warden.

    Args:
        seconds: after which the warden kills the group; None for never.
        options: of `subprocess.Popen`, for the command's environment and streams.

    Raises: OSError where the command cannot be started.
    """

    def __init__(self, command: list[str], seconds: float | None = None, **options):
        lifeline, self._lifeline = os.pipe()  # closed when this process is gone
        self._report, report = os.pipe()
        deadline = "never" if seconds is None else repr(time.monotonic() + seconds)
        words = [sys.executable, "-I", "-S", __file__, str(lifeline), str(report), deadline, *command]
        try:
            self.warden = subprocess.Popen(words, pass_fds=(lifeline, report), start_new_session=True, **options)
        finally:
            os.close(lifeline)
            os.close(report)
        self.stdout = self.warden.stdout
        pid, _, errno = self._read_line().partition(" ")
        if errno:
            self.warden.wait()
            raise OSError(int(errno), os.strerror(int(errno)))
        self.pid = int(pid or 0)

    def _read_line(self) -> str:
        with os.fdopen(os.dup(self._report), "rb", buffering=0) as file:
            return file.readline().decode().strip()

    @property
    def returncode(self) -> int | None:
        return self.warden.returncode

    def poll(self) -> int | None:
        return self.warden.poll()

    def wait(self, seconds: float | None = None) -> int:
        return self.warden.wait(seconds)

    def send_signal(self, number: int) -> None:
        """To every process of the command's group that is left."""
        if self.pid:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def seconds(self) -> float | None:
        """How long the command ran, as the warden measured it; None where it could not say."""
        text = self._read_line()
        return float(text) if text else None

    def close(self) -> None:
        """Kill what is left of the group."""
        self.send_signal(signal.SIGKILL)
        with suppress(OSError):
            os.close(self._lifeline)
        self.warden.wait()


def main(lifeline: int, report: int, deadline: float, command: list[str]) -> int:
    """The warden's own process. Its exit code, or the signal that ends it, is the command's."""
    for number in HEARD:
        signal.signal(number, to_program)
    for descriptor in (lifeline, report):
        os.set_inheritable(descriptor, False)
    begun = time.monotonic()
    try:
        child = subprocess.Popen(command, process_group=0, preexec_fn=die_with_parent)
    except OSError as error:
        os.write(report, f"0 {error.errno}\n".encode())
        return 127
    os.write(report, f"{child.pid}\n".encode())
    while child.poll() is None:
        left = min(0.05, max(0.0, deadline - time.monotonic()))
        gone, _, _ = select.select([lifeline], [], [], left)
        if gone or time.monotonic() >= deadline:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # what the command left behind
    with suppress(BrokenPipeError):
        os.write(report, f"{time.monotonic() - begun}\n".encode())
    return child.returncode


def to_program(number: int, frame) -> None:
    """A command that signals its parent means the program; which decides what follows."""
    if os.getppid() != 1:
        os.kill(os.getppid(), number)


def die_with_parent() -> None:
    """The command ends with its warden, should that be killed."""
    with suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)


if __name__ == "__main__":
    code = main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3].replace("never", "inf")), sys.argv[4:])
    if code < 0:  # end as the command did
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
