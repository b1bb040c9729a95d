"""The budget guard for any command, and the spend log by hand.

python -m experiments.budget init --budget 3.00
python -m experiments.budget run --price-per-hour 0.35 --devices 2 --hours 3 -- python train.py
"""

import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape

from jaxdist.errors import ConfigError
from jaxdist.runtime.budget import (
    BUDGET_VARIABLE,
    LOG_VARIABLE,
    Account,
    JobBudget,
    begin_job,
    exact,
    find_ceiling,
    find_log,
    money,
)

from .entry import EXIT_BUDGET, EXIT_SIGNAL, run_program
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

    command: Annotated[tuple[str, ...], tyro.conf.Positional]
    """What follows --, as in `-- sleep 60`."""
    price_per_hour: str
    """Dollars for one device, an hour."""
    devices: int = 1
    hours: str | None = None
    """Longest time, reserved before the command starts. Default: as long as the rest of the budget pays for."""
    budget: str | None = None
    """Dollars that all jobs in the spend log may cost together. Default: JAXDIST_BUDGET, else the log's ceiling."""
    grace: str = "30"
    """Seconds from asking the command to stop (SIGTERM) to ending it (SIGKILL); they are part of the hours."""


def main(flags: Init | Ceiling | Show | Settle | Run, console: Console) -> int:
    if isinstance(flags, Run):
        return run(flags, console)
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


def show(account: Account, path: Path, console: Console) -> None:
    table = Rows("job", "started (UTC)", "host", "pid", "what", "reserved", "actual", "counted")
    for job in account.jobs.values():
        actual = "not settled" if job.actual is None else money(job.actual)
        started = job.time[:19].replace("T", " ")
        table.add_row(job.id, started, job.host, job.pid, job.note, money(job.reserved), actual, money(job.counted))
    words = ("started (UTC)", "host", "pid", "what")
    table.print(console, left=words, under=words)
    spent, left = money(account.spent), money(account.left)
    text = f"{escape(str(path))}: budget {money(account.ceiling)}, spent or reserved {spent}, left {left}"
    console.print(text, soft_wrap=True)


# ---- run ----


def run(flags: Run, console: Console) -> int:
    """Reserve, run, stop when it is time, settle. Returns the command's own exit code, or why it was stopped.

    The command gets a process group of its own, and what is left of the group when the command ends is killed. The
    budget's variables are taken from its environment: what it runs is counted here.
    """
    command = list(flags.command)
    if not command:
        raise ConfigError("run without a command", "it must have one after `--`", "Add one, as in `-- sleep 60`")
    grace = float(exact("grace", flags.grace))
    environment = {k: v for k, v in os.environ.items() if k not in (BUDGET_VARIABLE, LOG_VARIABLE)}
    log, ceiling, name = find_log(flags.spend_log), find_ceiling(flags.budget), Path(command[0]).name
    job = begin_job(log, flags.devices, flags.price_per_hour, flags.hours, ceiling, name, STOP_SIGNALS)
    for line in job.announcement:
        console.print(line, soft_wrap=True)
    with job:
        if job.seconds_left() <= grace:
            required = f"must be less than the time that {money(job.job.reserved)} pays for"
            raise ConfigError(f"grace={flags.grace}", required, "Use more hours or less grace")
        before = job.seconds()
        try:
            process = Guarded(command, job.seconds_left() - LAST_MOMENT / 2, env=environment)
        except OSError as error:
            required = f"it cannot be run ({error.strerror})"
            raise ConfigError(f"the command {command[0]!r}", required, "Name one that can be executed") from error
        try:
            code = watch(process, job, grace, console)
        finally:
            process.close()
            if (ran := process.seconds()) is not None:  # this process may have been stopped when its command ended
                job.ended_after = before + ran
        console.print(f"cost {job.report()}", soft_wrap=True)
    return code


def watch(process: Guarded, job: JobBudget, grace: float, console: Console) -> int:
    """Wait for the command or for the moment to stop it; returns the exit code for either."""
    while process.poll() is None and job.signal is None and job.seconds_left() > max(grace, LAST_MOMENT):
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)
    by_warden = process.returncode == -signal.SIGKILL and job.seconds_left() <= LAST_MOMENT
    if process.returncode is not None and not by_warden:
        return EXIT_SIGNAL - process.returncode if process.returncode < 0 else process.returncode
    why = "the budget is used up" if job.signal is None else signal.Signals(job.signal).name
    console.print(f"[bold red]stopping[/] the command: {why}", soft_wrap=True)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)  # one that was stopped by hand can end now
    try:
        process.wait(max(0.0, min(grace, job.seconds_left() - LAST_MOMENT)))
    except subprocess.TimeoutExpired:
        console.print(f"[bold red]killing[/] the command: it did not stop in {grace:g} s")
    return EXIT_BUDGET if job.signal is None else EXIT_SIGNAL + job.signal


if __name__ == "__main__":
    run_program(Init | Ceiling | Show | Settle | Run, main, "budget")
