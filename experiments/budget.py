"""The budget guard for any command, and the spend log by hand.

python -m experiments.budget init --budget 3.00
python -m experiments.budget run --price-per-hour 0.35 --devices 2 --hours 3 -- python train.py
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from jaxdist.errors import ConfigError
from jaxdist.runtime.budget import (
    BUDGET_VARIABLE,
    LOG_VARIABLE,
    JobBudget,
    begin_job,
    exact,
    find_ceiling,
    find_log,
    money,
)

from .cli import EXIT_BUDGET, EXIT_SIGNAL, run_program
from .tables import Rows
from .warden import Guarded

POLL_SECONDS = 0.2
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
LAST_MOMENT = 0.3  # seconds before the reservation ends by which the command is killed; half of it is the warden's


@dataclass(frozen=True, kw_only=True)
class LogFlags:
    spend_log: str | None = None
    """Default: JAXDIST_SPEND_LOG, else spend.jsonl."""


@dataclass(frozen=True)
class Init(LogFlags):
    """Make a spend log with its ceiling."""

    budget: str | None = None
    """Dollars that all jobs in the log may cost together. Default: JAXDIST_BUDGET."""


@dataclass(frozen=True)
class Ceiling(LogFlags):
    """Raise or lower the ceiling of a spend log."""

    budget: str | None = None
    """The new ceiling in dollars, over everything the log has counted already. Default: JAXDIST_BUDGET."""


@dataclass(frozen=True)
class Show(LogFlags):
    """What was spent, what is reserved and what is left."""


@dataclass(frozen=True)
class Settle(LogFlags):
    """Write what a job cost that died before it could; its whole reservation counts until then."""

    job: str
    """As `show` names it."""
    actual: str
    """Dollars."""


@dataclass(frozen=True)
class Run(LogFlags):
    """Run the command after `--` under a budget, and stop it when time or money is used up."""

    price_per_hour: str
    """Dollars for one device, an hour."""
    devices: int = 1
    hours: str | None = None
    """Longest time, reserved before the command starts. Default: as long as the rest of the budget pays for."""
    budget: str | None = None
    """Dollars that all jobs in the spend log may cost together. Default: JAXDIST_BUDGET, else the log's ceiling."""
    grace: str = "30"
    """Seconds from asking the command to stop (SIGTERM) to ending it (SIGKILL); they are part of the hours."""


def main(flags: Init | Ceiling | Show | Settle | Run, console: Console, command: list[str]) -> int:
    if isinstance(flags, Run):
        return run(flags, command, console)
    if command:
        raise ConfigError(f"the command {command[0]!r} after --", "must be given to `run` only", "Leave it out")
    log = find_log(flags.spend_log)
    if isinstance(flags, Settle):
        log.settle(flags.job, exact("actual", flags.actual), note="by hand")
    elif isinstance(flags, Init | Ceiling):
        ceiling = find_ceiling(flags.budget)
        if ceiling is None:
            raise ConfigError("no --budget", "a spend log must have a ceiling", "Give one, as in --budget 3.00")
        log.create(ceiling) if isinstance(flags, Init) else log.set_ceiling(ceiling)
    show(log.read(), log.path, console)
    return 0


def show(account, path: Path, console: Console) -> None:
    if account.jobs:
        table = Rows("job", "started (UTC)", "host", "pid", "what", "reserved", "actual", "counted")
        for job in account.jobs.values():
            actual = "not settled" if job.actual is None else money(job.actual)
            cells = (job.id, f"{job.time:%Y-%m-%d %H:%M:%S}", job.host, str(job.pid), job.note)
            table.add_row(*cells, money(job.reserved), actual, money(job.counted))
        words = ("started (UTC)", "host", "pid", "what")
        table.print(console, left=words, under=words)
    console.print(
        f"{escape(str(path))}: budget {money(account.ceiling)}, spent or reserved {money(account.spent)}, "
        f"left {money(account.left)}",
        soft_wrap=True,
    )


# ---- run ----


def run(flags: Run, command: list[str], console: Console, now: Callable[[], float] = time.monotonic) -> int:
    """Reserve, run, stop when it is time, settle. Returns the command's own exit code, or why it was stopped.

    The command gets a process group of its own, and what is left of the group when the command ends is killed. The
    budget's variables are taken from its environment: what it runs is counted here.
    """
    if not command:
        raise ConfigError("run without a command", "it must have one after `--`", "Add one, as in `-- sleep 60`")
    program = shutil.which(command[0])
    if program is None:
        raise ConfigError(f"the command {command[0]!r}", "there is no such program", "Name one that can be executed")
    grace = float(exact("grace", flags.grace))
    environment = {k: v for k, v in os.environ.items() if k not in (BUDGET_VARIABLE, LOG_VARIABLE)}
    log, ceiling, name = find_log(flags.spend_log), find_ceiling(flags.budget), Path(command[0]).name
    job = begin_job(log, flags.devices, flags.price_per_hour, flags.hours, ceiling, name, STOP_SIGNALS, now)
    for line in job.announcement:
        console.print(line, soft_wrap=True)
    with job:
        if job.clock.exceeded(ahead_seconds=grace):
            raise ConfigError(
                f"grace={flags.grace}",
                f"must be less than the time that {money(job.job.reserved)} pays for, whose end these seconds are",
                "Use more hours or less grace",
            )
        before = job.clock.seconds()
        try:
            process = Guarded(command, job.clock.seconds_left() - LAST_MOMENT / 2, env=environment)
        except OSError as error:
            raise ConfigError(
                f"the command {command[0]!r}", f"it cannot be run ({error.strerror})", "Name one that can be executed"
            ) from error
        try:
            code = watch(process, job, grace, console)
        finally:
            process.close()
            ran = process.seconds()
            if ran is not None and now is time.monotonic:  # this process may have been stopped when its command ended
                job.clock.end(before + ran)
        console.print(f"cost {job.report()}", soft_wrap=True)
    return code


def watch(process: Guarded, job: JobBudget, grace: float, console: Console) -> int:
    """Wait for the command or for the moment to stop it; returns the exit code for either."""
    ahead = max(grace, LAST_MOMENT)
    wait(process, lambda: job.signal is not None or job.clock.exceeded(ahead_seconds=ahead))
    by_warden = process.returncode == -signal.SIGKILL and job.clock.exceeded(ahead_seconds=LAST_MOMENT)
    if process.returncode is not None and not by_warden:
        return EXIT_SIGNAL - process.returncode if process.returncode < 0 else process.returncode
    why = "the budget is used up" if job.signal is None else signal.Signals(job.signal).name
    console.print(f"[bold red]stopping[/] the command: {why}", soft_wrap=True)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)  # one that was stopped by hand can end now
    deadline = job.clock.seconds() + min(grace, job.clock.seconds_left() - LAST_MOMENT)
    wait(process, lambda: job.clock.seconds() >= deadline)
    if process.returncode is None:
        console.print(f"[bold red]killing[/] the command: it did not stop in {grace:g} s")
    return EXIT_BUDGET if job.signal is None else EXIT_SIGNAL + job.signal


def wait(process: Guarded, until: Callable[[], bool]) -> None:
    """Return when the process has ended or `until` holds."""
    while process.poll() is None and not until():
        try:
            process.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            continue


if __name__ == "__main__":
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    after = words[split + 1 :]
    run_program(
        Init | Ceiling | Show | Settle | Run,
        lambda flags, console: main(flags, console, after),
        "budget",
        args=words[:split],
    )
