"""Start one run as several processes on this machine, for tests and for trying things out.

python -m experiments.launch --processes 2 --devices-per-process 4 -- -m experiments.train --mesh dp=8

On a cluster Slurm, Open MPI or Kubernetes does this (docs/cluster.md). Here each process gets an address to meet at,
its number, and its share of simulated devices; what it prints is passed on with its number before each line.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from jaxdist.errors import ConfigError, require_positive, require_within
from jaxdist.runtime.devices import MAX_SIMULATED
from jaxdist.runtime.signals import EXIT_SIGNAL, Signals

from .entry import run_program
from .warden import Guarded

POLL_SECONDS = 0.1


@dataclass(frozen=True)
class LaunchFlags:
    """Run `python COMMAND` as several processes that find each other."""

    command: Annotated[tuple[str, ...], tyro.conf.Positional]
    """What follows --: arguments of python, as in -m jaxdist train --mesh dp=8."""
    processes: int = 2
    devices_per_process: int = 1
    """Simulated CPU devices of each."""
    bound: float = 60.0
    """Seconds that the others have to end by themselves after one has failed, and after a signal was passed on."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """The command without the `python` that it may begin with: this one runs it."""
        named = self.command and Path(self.command[0]).name
        return self.command[1:] if re.fullmatch(r"python[0-9.]*", named or "") else self.command


def main(flags: LaunchFlags, console: Console) -> int:
    """The exit code is that of the first process that failed, else 0."""
    require_positive("processes", flags.processes, 256)
    require_positive("devices_per_process", flags.devices_per_process, MAX_SIMULATED)
    require_within("bound", flags.bound, 0, 1e6)
    if not flags.arguments:
        raise ConfigError("no command", "there must be one to start", "Write -- -m jaxdist train --mesh dp=2")
    address = f"127.0.0.1:{free_port()}"
    with Signals() as signals, ExitStack() as stack:
        processes = []
        for index in range(flags.processes):
            processes.append(start(flags, index, address))
            stack.callback(processes[-1].close)  # a second signal ends everything at once
        readers = [pass_on(process, index, signals) for index, process in enumerate(processes)]
        code = wait(processes, signals, flags.bound)
        for reader in readers:
            reader.join()
    return code


def start(flags: LaunchFlags, index: int, address: str) -> Guarded:
    """One process in a group of its own: Ctrl-C in a terminal reaches it once, passed on; it ends with this one."""
    environment = {
        **os.environ,
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(flags.processes),
        "JAX_PROCESS_ID": str(index),
        "JAX_NUM_CPU_DEVICES": str(flags.devices_per_process),
    }
    return Guarded(
        [sys.executable, *flags.arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="backslashreplace",
    )


def pass_on(process: Guarded, index: int, signals: Signals) -> threading.Thread:
    def copy():
        for line in process.stdout:  # to its end, or the process would wait for a reader
            try:
                print(f"[{index}] {line}", end="", flush=True)
            except OSError:  # whoever read the output has had enough, or its terminal is closed
                signals.ask(signal.SIGTERM)

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    return thread


def wait(processes: list[Guarded], signals: Signals, bound: float) -> int:
    """Until all have ended. Signals are passed on; where one failed, the others are killed after `bound` seconds."""
    first_failure, deadline, passed = None, None, False
    while True:
        codes = [process.poll() for process in processes]
        failed = [(index, code) for index, code in enumerate(codes) if code]
        if failed and first_failure is None:
            index, code = failed[0]
            first_failure = EXIT_SIGNAL - code if code < 0 else code
            deadline = time.monotonic() + bound
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            say(f"process {index} {how}" + (f"; the others have {bound:g} s to end" if None in codes else ""))
        if signals.number is not None and not passed:
            passed, deadline = True, time.monotonic() + bound
            send(processes, signals.number)
        if None not in codes:
            return first_failure or 0
        if deadline is not None and time.monotonic() > deadline:
            late = [f"process {index}" for index, code in enumerate(codes) if code is None]
            say(f"{', '.join(late)} did not end within {bound:g} s: killed")
            send(processes, signal.SIGKILL)
            deadline = None
        time.sleep(POLL_SECONDS)


def say(text: str) -> None:
    with suppress(OSError):  # nobody reads it any more
        print(f"launch: {text}", file=sys.stderr, flush=True)


def send(processes: list[Guarded], number: int) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


if __name__ == "__main__":
    run_program(LaunchFlags, main, "launch")
