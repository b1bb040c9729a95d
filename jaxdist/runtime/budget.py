"""What a job may cost: reserved in a log before it starts, measured while it runs, settled when it ends.

No JAX here. Money is `decimal.Decimal`, never float, in whole millionths (`UNIT`); a computed amount is rounded up to
one. What counts as spent is the actual cost of every job that was settled and the whole reservation of every job that
was not: a job that died keeps its estimate until somebody settles it by hand. A reservation is refused when it and what
is spent come to more than the ceiling; exactly the ceiling is allowed.

The spend log is a file of JSON lines that only grows, under `flock`. One that cannot be read to its end is refused.
"""

import errno
import json
import os
import re
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal, localcontext
from pathlib import Path
from typing import Self

from jaxdist.commands import command_text
from jaxdist.errors import ConfigError, require_positive
from jaxdist.runtime.signals import Signals

try:
    import fcntl
except ImportError:  # not a POSIX system: every use of a log is refused
    fcntl = None

BUDGET_VARIABLE = "JAXDIST_BUDGET"
LOG_VARIABLE = "JAXDIST_SPEND_LOG"
DEFAULT_LOG = "spend.jsonl"

UNIT = Decimal("0.000001")
LIMIT = Decimal(10**12)
_UP = Context(prec=60, rounding=ROUND_CEILING)  # sums and products of amounts below LIMIT are exact in it


# ---- amounts ----


def exact(name: str, value: str | int | Decimal) -> Decimal:
    """A number that is exactly what was written: at least 0, at most `LIMIT`, six digits after the point.

    Raises: ConfigError for anything else, a float among it.
    """
    number = None
    if isinstance(value, Decimal) and value.is_finite():
        number = value
    elif isinstance(value, int) or (isinstance(value, str) and re.fullmatch(r"[0-9]+(\.[0-9]+)?", value, re.ASCII)):
        number = Decimal(value)
    if number is None or not 0 <= number <= LIMIT or int(number.normalize(_UP).as_tuple().exponent) < -6:
        required = f"must be an exact number from 0 to {LIMIT:,}, with at most 6 digits after the point"
        raise ConfigError(f"{name}={value}", required, f"Write it out, as in {name}=0.35")
    return number.normalize(_UP).copy_abs()  # -0 is 0


def cost(price_per_hour: Decimal, num_devices: int, seconds: Decimal | float) -> Decimal:
    """price x devices x time, rounded up to a `UNIT`; divided last, so that a whole result stays whole."""
    with localcontext(_UP):
        return (price_per_hour * num_devices * Decimal(seconds) / 3600).quantize(UNIT)


def affordable_hours(price_per_hour: Decimal, num_devices: int, amount: Decimal) -> Decimal:
    """The hours that `amount` pays for, rounded down to a millionth; 0 where nothing is left. The price is above 0."""
    with localcontext(_UP, rounding=ROUND_FLOOR):
        return (max(amount, Decimal(0)) / (price_per_hour * num_devices)).quantize(UNIT)


def money(amount: Decimal) -> str:
    """$2.10; $0.000241: cents, and further digits only where there are any."""
    whole, digits = f"{amount.copy_abs():,.6f}".split(".")
    return f"{'-' * (amount < 0)}${whole}.{digits[:2]}{digits[2:].rstrip('0')}"


def round_up(number: float, rounding: str = ROUND_CEILING) -> Decimal:
    """A computed number of hours or dollars for display, never below it: two digits after the point, more where three
    would not be left of it, and at most six."""
    exact_enough = Decimal(f"{number:.12g}")  # a float's own error is no reason for another digit
    exponent = min(-2, max(exact_enough.adjusted() - 2, -6))
    return exact_enough.quantize(Decimal(1).scaleb(exponent), context=Context(prec=60, rounding=rounding))


def short_money(dollars: float, rounding: str = ROUND_CEILING) -> str:
    """A computed amount for a table: rounded up, to whole dollars from a thousand on."""
    if dollars >= 1000:
        return f"${Decimal(f'{dollars:.12g}').quantize(Decimal(1), context=Context(prec=60, rounding=rounding)):,}"
    return money(round_up(dollars, rounding))


def money_range(low: float, high: float) -> str:
    """ "$11,242 to $21,451": the first rounded down, the second up."""
    return f"{short_money(low, ROUND_FLOOR)} to {short_money(high)}"


def plain(number: Decimal) -> str:
    """3, 1.5: as few digits as say it exactly."""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def sentence(
    price_per_hour: Decimal,
    num_devices: int,
    hours: Decimal,
    ceiling: Decimal | None = None,
    spent: Decimal = Decimal(0),
    device: str = "",
) -> str:
    """The sentence before launch: `2 × $0.35/h × 3 h = $2.10. Budget $3.00, buffer $0.90.`

    The buffer is what the budget would still hold if the job took all of its hours; `spent` (finished jobs and what
    running ones have reserved) is named where there is any. `device`: as in `2 GPUs × ...`.
    """
    devices = f"{num_devices:,}" + (device and f" {device}{'s' * (num_devices != 1)}")
    estimate = cost(price_per_hour, num_devices, hours * 3600)
    text = f"{devices} × {money(price_per_hour)}/h × {plain(hours)} h = {money(estimate)}."
    if ceiling is None:
        return text
    before = f"spent or reserved before {money(spent)}, " if spent else ""
    buffer = ceiling - spent - estimate
    ending = f"{money(-buffer)} over" if buffer < 0 else f"buffer {money(buffer)}"
    return f"{text} Budget {money(ceiling)}, {before}{ending}."


# ---- the log ----


@dataclass(frozen=True)
class Job:
    """One reservation. `actual` is None until it is settled; `time` is UTC, in ISO 8601."""

    id: str
    reserved: Decimal
    actual: Decimal | None
    time: str
    host: str
    pid: str
    note: str

    @property
    def counted(self) -> Decimal:
        return self.reserved if self.actual is None else self.actual


@dataclass(frozen=True)
class Account:
    """What a whole, undamaged log says."""

    ceiling: Decimal
    jobs: dict[str, Job]

    @property
    def spent(self) -> Decimal:
        """Actual costs of settled jobs and reservations of all others."""
        return sum((job.counted for job in self.jobs.values()), Decimal(0))

    @property
    def left(self) -> Decimal:
        """Below 0 where jobs cost more than they had reserved, or the ceiling was lowered."""
        return self.ceiling - self.spent

    def under(self, ceiling: Decimal | None) -> "Account":
        """The account as a job sees it that was given a ceiling of its own. Raises: ConfigError above the log's."""
        if ceiling is None:
            return self
        if ceiling > self.ceiling:
            raise ConfigError(
                f"a budget of {money(ceiling)}",
                f"must be at most the ceiling in the spend log, {money(self.ceiling)}, which a job cannot raise",
                f"Use that or less, or `{command_text('budget')} ceiling --budget {plain(ceiling)}`",
            )
        return replace(self, ceiling=ceiling)


class SpendLog:
    """The log at `path`.

    Raises, from every method: ConfigError where the log is missing, cannot be read, locked or written, or is damaged.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def create(self, ceiling: Decimal) -> None:
        """A new log with its ceiling. Raises: ConfigError where there is one."""
        ceiling = exact("budget", ceiling)
        try:
            self.path.touch(exist_ok=False)
        except FileExistsError as error:
            change = f"Use it, change its ceiling with `{command_text('budget')} ceiling`, or name another file"
            raise self._error("must not exist yet, and it does: what it says still counts", change) from error
        except OSError as error:
            raise self._unusable(error) from error
        try:
            with self._locked(write=True, new=True) as (fd, _):
                _append(fd, "ceiling", "", ceiling, "")
        except ConfigError:
            self.path.unlink()  # made a moment ago, by nobody else
            raise

    def read(self) -> Account:
        with self._locked() as (_, account):
            return account

    def spent(self) -> Decimal:
        """Actual costs of settled jobs and reservations of all others."""
        return self.read().spent

    def set_ceiling(self, ceiling: Decimal) -> None:
        """Raise or lower the ceiling, from now on."""
        with self._locked(write=True) as (fd, _):
            _append(fd, "ceiling", "", exact("budget", ceiling), "")

    def reserve(
        self, estimate: Decimal, ceiling: Decimal | None = None, note: str = "", asked: str | None = None
    ) -> tuple[Job, Account]:
        """Write a job's estimate before it starts; returns the job, and the account as it was before.

        Args: a `ceiling` below the log's own holds for this job alone; `asked` words a refusal.
        Raises: ConfigError where the estimate and what is spent exceed the ceiling.
        """
        estimate = exact("estimate", estimate)
        with self._locked(write=True) as (fd, account):
            account = account.under(ceiling)
            if estimate > account.left:
                raise ConfigError(
                    asked or f"a reservation of {money(estimate)}",
                    f"must fit the budget of {money(account.ceiling)}, of which {money(account.spent)} is spent or "
                    f"reserved: {money(estimate - account.left)} too much",
                    f"Reserve at most {money(max(account.left, Decimal(0)))}, settle jobs that died, or raise the "
                    f"ceiling (`{command_text('budget')} show`, `settle`, `ceiling`)",
                )
            return _append(fd, "reserve", secrets.token_hex(4), estimate, note), account

    def settle(self, job_id: str, actual: Decimal, note: str = "") -> None:
        """Write what a job cost, in place of its reservation. More than was reserved is written too: it was spent.

        Raises: ConfigError for a job that was never reserved or is settled already.
        """
        actual = exact("actual", actual)
        with self._locked(write=True) as (fd, account):
            unsettled = [job.id for job in account.jobs.values() if job.actual is None]
            if job_id not in unsettled:
                raise ConfigError(
                    f"settling job {job_id!r} in {self.path}",
                    "must be of a job that was reserved and is not settled yet",
                    f"Name one of those: {', '.join(unsettled) or 'there are none'}",
                )
            _append(fd, "settle", job_id, actual, note)

    @contextmanager
    def _locked(self, write: bool = False, new: bool = False) -> Iterator[tuple[int, Account]]:
        """The locked file's descriptor and what it says."""
        if not self.path.is_file():
            raise self._error(
                "must be a file that `init` made: without one nobody knows what was spent",
                f"Make one with its ceiling: `{command_text('budget')} init --budget 3.00 "
                f"--spend-log {self.path}`, or name another with spend_log=PATH or {LOG_VARIABLE}",
            )
        if fcntl is None:
            raise self._error("this system has no file locks (fcntl)", "Use Linux or macOS")
        try:
            with open(self.path, "r+b" if write else "rb", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX if write else fcntl.LOCK_SH)
                yield file.fileno(), Account(Decimal(0), {}) if new else self._account(file.read())
        except OSError as error:
            raise self._unusable(error) from error

    def _account(self, content: bytes) -> Account:
        """What the lines add up to, each of which must follow from those before it."""
        ceiling, jobs = None, dict[str, Job]()
        for number, line in enumerate(content.splitlines(keepends=True), 1):
            try:
                record = json.loads(line) if line.endswith(b"\n") else {}  # which lacks all of it: it is cut off
                amount, job_id = exact("amount", record["amount"]), str(record["job"])
                known = jobs.get(job_id)
                if record["kind"] == "ceiling":
                    ceiling = amount
                elif record["kind"] == "reserve" and ceiling is not None and known is None:
                    about = (record[name] for name in ("time", "host", "pid", "note"))
                    jobs[job_id] = Job(job_id, amount, None, *map(str, about))
                elif record["kind"] == "settle" and known is not None and known.actual is None:
                    jobs[job_id] = replace(known, actual=amount)
                else:
                    raise ValueError(record)
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise self._error(
                    f"line {number} is damaged, cut off, or does not follow from those before it",
                    "Remove it if it is the last and was never whole; else put the log back from a backup, or start "
                    f"another with what is left: `{command_text('budget')} init`",
                ) from error
        if ceiling is None:
            raise self._error("must have a ceiling, and it is empty", f"Remove it, `{command_text('budget')} init`")
        return Account(ceiling, jobs)

    def _error(self, required: str, remedy: str) -> ConfigError:
        return ConfigError(f"spend log {self.path}", required, remedy)

    def _unusable(self, error: OSError) -> ConfigError:
        return self._error(f"it cannot be used ({error.strerror})", "Name a file that you may read and write")


def _append(fd: int, kind: str, job: str, amount: Decimal, note: str) -> Job:
    """One line, on disk before this returns. Raises: OSError, with the file as it was."""
    about = {"time": datetime.now(UTC).isoformat(), "host": socket.gethostname(), "pid": os.getpid(), "note": note}
    line = json.dumps({"kind": kind, "job": job, "amount": plain(amount), **about}).encode() + b"\n"
    size = os.lseek(fd, 0, os.SEEK_END)
    try:
        if os.write(fd, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(fd)
    except OSError:
        os.ftruncate(fd, size)
        raise
    return Job(job, amount, None, *map(str, about.values()))


# ---- a running job ----


class JobBudget:
    """One job under a budget, as a context: reserved by `begin_job`, settled with its actual cost on every way out.

    Inside, the first of `signals` to come is kept in `self.signal` for the job to stop by itself; the next one ends it
    at once, by SystemExit. A job killed otherwise is not settled, and its whole reservation stays counted.

    announcement: what it may cost, a sentence a line, to be said before it starts. ended_after: seconds that the job
    took, where somebody else measured them.
    """

    def __init__(
        self,
        log: SpendLog,
        job: Job,
        rate: tuple[Decimal, int],
        max_seconds: float,
        signals: tuple[int, ...],
        now: Callable[[], float],
        announcement: Sequence[str],
    ):
        self.log, self.job, self.max_seconds, self.announcement = log, job, max_seconds, announcement
        self.ended_after: float | None = None
        self._rate, self._signals, self._now, self._start = rate, Signals(signals), now, now()
        self._last_look: float | None = None
        self._longest = 0.0

    def seconds(self) -> float:
        """Since the reservation."""
        return self._now() - self._start if self.ended_after is None else self.ended_after

    def seconds_left(self) -> float:
        """Until what is reserved is used up; negative afterwards."""
        return self.max_seconds - self.seconds()

    def cost(self) -> Decimal:
        """So far."""
        return cost(*self._rate, self.seconds())

    def stop_reason(self, in_flight: int = 0) -> str | None:
        """Asked before each step: why it must not start, or None.

        A step that would take as long as the longest so far (asking to asking) must still fit, after those `in_flight`
        that have begun and are not finished.
        """
        now = self.seconds()
        if self._last_look is not None:
            self._longest = max(self._longest, now - self._last_look)
        self._last_look = now
        if self._signals.reason is not None:
            return self._signals.reason
        if self.seconds_left() <= 0 or self.seconds_left() < self._longest * (1 + in_flight):
            return f"the budget is used up: {self.report()}"
        return None

    def report(self) -> str:
        return f"{money(self.cost())} of {money(self.job.reserved)} reserved, in {self.seconds():.1f} s"

    @property
    def signal(self) -> int | None:
        return self._signals.number

    def __enter__(self) -> Self:
        self._signals.__enter__()
        return self

    def __exit__(self, *_) -> None:
        self._signals.ignored = True
        try:
            self.log.settle(self.job.id, self.cost())
        finally:
            self._signals.__exit__()


def is_asked_for(*flags: str | None) -> bool:
    """Whether a budget's flag or variable is set at all. One is enough: half a budget is refused, not ignored."""
    return any(each is not None for each in (*flags, os.environ.get(BUDGET_VARIABLE), os.environ.get(LOG_VARIABLE)))


def find_log(spend_log: str | None) -> SpendLog:
    """The log that the flag names, else the variable, else `spend.jsonl` in the working folder."""
    return SpendLog(os.environ.get(LOG_VARIABLE, DEFAULT_LOG) if spend_log is None else spend_log)


def find_ceiling(budget: str | None) -> Decimal | None:
    """The amount that the flag names, else the variable; None for the log's own ceiling."""
    named = os.environ.get(BUDGET_VARIABLE) if budget is None else budget
    return None if named is None else exact("budget", named)


def begin_job(
    log: SpendLog,
    num_devices: int,
    price_per_hour: str | Decimal | None,
    hours: str | Decimal | None = None,
    ceiling: Decimal | None = None,
    note: str = "",
    signals: tuple[int, ...] = (signal.SIGTERM,),
    now: Callable[[], float] = time.monotonic,
) -> JobBudget:
    """Reserve what a job may cost. Without `hours` the whole rest of the budget is reserved.

    Args: `price_per_hour` of one device; a `ceiling` below the log's own holds for this job alone; `now`, in seconds,
    measures the job and must not jump.
    Raises: ConfigError where anything is missing or wrong, the log cannot be trusted, or the budget is too small.
    """
    require_positive("num_devices", num_devices, 10**6)
    if price_per_hour is None:
        raise ConfigError("a budget without a price", "must have one", "Give price_per_hour=0.35, of one device")
    price = exact("price_per_hour", price_per_hour)
    if hours is not None:
        limit = exact("hours", hours)
    elif price:
        limit = affordable_hours(price, num_devices, log.read().under(ceiling).left)
    else:
        raise ConfigError("a price of 0 and no hours", "something must stop the job", "Give a number of hours")
    if not limit:
        asked = "a job for the whole rest of the budget" if hours is None else f"hours={hours}"
        raise ConfigError(asked, "must have time, and there is none", "Use more hours, or raise the ceiling")
    asked = sentence(price, num_devices, limit).removesuffix(".")
    job, before = log.reserve(cost(price, num_devices, limit * 3600), ceiling, note, asked)
    said = ["No hours were given: the whole rest of the budget is reserved."] if hours is None else []
    said.append(sentence(price, num_devices, limit, before.ceiling, before.spent))
    return JobBudget(log, job, (price, num_devices), float(limit) * 3600, signals, now, said)
