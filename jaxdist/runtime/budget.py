"""What a job may cost: reserved in a log before it starts, measured while it runs, settled when it ends.

No JAX here. Money is `decimal.Decimal`, never float, in whole millionths (`UNIT`); a computed amount is rounded up to
one. What counts as spent is the actual cost of every job that was settled and the whole reservation of every job that
was not: a job that died keeps its estimate until somebody settles it by hand. A reservation is refused when it and what
is spent come to more than the ceiling; exactly the ceiling is allowed.

The spend log is a file of JSON lines that only grows. A log that cannot be read to its end, line by line, is refused:
nothing is reserved on it. That guards against accidents; whoever can write the file can also forge it.

Two jobs at once are kept apart by `flock` on the log. On local disks that holds; on NFS it depends on the server and
its mount options, and it is not checked there.
"""

import json
import math
import os
import re
import secrets
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from pathlib import Path
from typing import Self

from jaxdist.commands import command_text
from jaxdist.errors import ConfigError
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
SKEW_SECONDS = 60.0  # how far the clocks of two machines that share a log may differ

_UP = Context(prec=60, rounding=ROUND_CEILING)  # sums and products of amounts below LIMIT are exact in it
_NOTHING = Decimal(0)


def _lost() -> str:
    return (
        "Put it back from a backup, or start another log, its ceiling no more than what is left: "
        f"`{command_text('budget')} init --budget AMOUNT --spend-log OTHER`"
    )


def _commands() -> str:
    return f"(`{command_text('budget')} show`, `settle`, `ceiling`)"


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
        raise ConfigError(
            f"{name}={value}",
            f"must be an exact number from 0 to {LIMIT:,}, with at most 6 digits after the point"
            + (" (a float is not exact)" if isinstance(value, float) else ""),
            f"Write it out, as in {name}=0.35",
        )
    return number.normalize(_UP).copy_abs()  # -0 is 0


def cost(price_per_hour: Decimal, num_devices: int, hours: Decimal) -> Decimal:
    """price x devices x hours, rounded up to a `UNIT`."""
    return _UP.multiply(_UP.multiply(price_per_hour, Decimal(num_devices)), hours).quantize(UNIT, context=_UP)


def cost_of_seconds(price_per_hour: Decimal, num_devices: int, seconds: float) -> Decimal:
    """The same for a measured time; divided last, so that a whole result stays whole."""
    times_3600 = _UP.multiply(_UP.multiply(price_per_hour, Decimal(num_devices)), Decimal(seconds))
    return _UP.divide(times_3600, Decimal(3600)).quantize(UNIT, context=_UP)


def affordable_hours(price_per_hour: Decimal, num_devices: int, amount: Decimal) -> Decimal:
    """The hours that `amount` pays for, rounded down to a millionth; 0 where nothing is left. The price is above 0."""
    per_hour = _UP.multiply(price_per_hour, Decimal(num_devices))
    return _UP.multiply(_UP.divide_int(_UP.multiply(max(amount, _NOTHING), Decimal(10**6)), per_hour), UNIT)


def total(amounts) -> Decimal:
    result = _NOTHING
    for amount in amounts:
        result = _UP.add(result, amount)
    return result


def money(amount: Decimal) -> str:
    """$2.10; $0.000241: cents, and further digits only where there are any."""
    whole, digits = f"{amount.copy_abs():,.6f}".split(".")
    return f"{'-' * (amount < 0)}${whole}.{digits[:2]}{digits[2:].rstrip('0')}"


def round_up(number: float) -> Decimal:
    """A computed number of hours or dollars for display, never below it: two digits after the point, more where three
    would not be left of it, and at most six."""
    return _rounded(number, ROUND_CEILING)


def short_money(dollars: float, rounding: str = ROUND_CEILING) -> str:
    """A computed amount for a table: rounded up, to whole dollars from a thousand on."""
    if dollars >= 1000:
        return f"${Decimal(f'{dollars:.12g}').quantize(Decimal(1), context=Context(prec=60, rounding=rounding)):,}"
    return money(_rounded(dollars, rounding))


def money_range(low: float, high: float) -> str:
    """ "$11,242 to $21,451": the first rounded down, the second up."""
    return f"{short_money(low, ROUND_FLOOR)} to {short_money(high)}"


def _rounded(number: float, rounding: str) -> Decimal:
    exact_enough = Decimal(f"{number:.12g}")  # a float's own error is no reason for another digit
    exponent = min(-2, max(exact_enough.adjusted() - 2, -6))
    return exact_enough.quantize(Decimal(1).scaleb(exponent), context=Context(prec=60, rounding=rounding))


def plain(number: Decimal) -> str:
    """3, 1.5: as few digits as say it exactly."""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def sentence(
    price_per_hour: Decimal,
    num_devices: int,
    hours: Decimal,
    ceiling: Decimal | None = None,
    spent: Decimal = _NOTHING,
    device: str = "",
) -> str:
    """The sentence before launch: `2 × $0.35/h × 3 h = $2.10. Budget $3.00, buffer $0.90.`

    The buffer is what the budget would still hold if the job took all of its hours; `spent` (finished jobs and what
    running ones have reserved) is named where there is any. `device`: as in `2 GPUs × ...`.
    """
    devices = f"{num_devices:,}" + (device and f" {device}{'s' * (num_devices != 1)}")
    estimate = cost(price_per_hour, num_devices, hours)
    text = f"{devices} × {money(price_per_hour)}/h × {plain(hours)} h = {money(estimate)}."
    if ceiling is None:
        return text
    before = f"spent or reserved before {money(spent)}, " if spent else ""
    buffer = _UP.subtract(_UP.subtract(ceiling, spent), estimate)
    ending = f"{money(buffer.copy_abs())} over" if buffer < 0 else f"buffer {money(buffer)}"
    return f"{text} Budget {money(ceiling)}, {before}{ending}."


# ---- the log ----


@dataclass(frozen=True)
class Job:
    """One reservation. `actual` is None until it is settled; `time` is UTC."""

    id: str
    reserved: Decimal
    actual: Decimal | None
    time: datetime
    host: str
    pid: int
    note: str

    @property
    def counted(self) -> Decimal:
        return self.reserved if self.actual is None else self.actual


@dataclass(frozen=True)
class Account:
    """What a whole, undamaged log says."""

    ceiling: Decimal
    jobs: dict[str, Job]
    last_time: datetime

    @property
    def spent(self) -> Decimal:
        """Actual costs of settled jobs and reservations of all others."""
        return total(job.counted for job in self.jobs.values())

    @property
    def left(self) -> Decimal:
        """Below 0 where jobs cost more than they had reserved, or the ceiling was lowered."""
        return _UP.subtract(self.ceiling, self.spent)

    def under(self, ceiling: Decimal | None) -> "Account":
        """The account as a job sees it that was given a ceiling of its own. Raises: ConfigError above the log's."""
        if ceiling is None:
            return self
        ceiling = exact("budget", ceiling)
        if ceiling > self.ceiling:
            raise ConfigError(
                f"a budget of {money(ceiling)}",
                f"must be at most the ceiling in the spend log, {money(self.ceiling)}, which a job cannot raise",
                f"Use that or less, or `{command_text('budget')} ceiling --budget {plain(ceiling)}`",
            )
        return replace(self, ceiling=ceiling)


class SpendLog:
    """The log at `path`. `now` is the wall clock, in seconds since 1970.

    Raises, from every method: ConfigError where the log is missing, cannot be read, locked or written, or is damaged.
    """

    def __init__(self, path: str | Path, now: Callable[[], float] = time.time):
        self.path, self.now = Path(path), now

    def create(self, ceiling: Decimal) -> None:
        """A new log with its ceiling. Raises: ConfigError where there is one."""
        ceiling = exact("budget", ceiling)
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError as error:
            raise ConfigError(
                f"a new spend log {self.path}",
                "must not exist yet, and it does: what it says still counts",
                f"Use it as it is, change its ceiling with `{command_text('budget')} ceiling`, or name another file",
            ) from error
        except OSError as error:
            raise self._unusable(error) from error
        try:
            self._lock(fd, exclusive=True)
            self._append(fd, "ceiling", "", ceiling, "", self._wall())
        except ConfigError:
            os.unlink(self.path)  # made a moment ago, by nobody else
            raise
        finally:
            os.close(fd)

    def read(self) -> Account:
        with self._open(write=False) as (_, account):
            return account

    def spent(self) -> Decimal:
        """Actual costs of settled jobs and reservations of all others."""
        return self.read().spent

    def set_ceiling(self, ceiling: Decimal) -> None:
        """Raise or lower the ceiling, from now on."""
        ceiling = exact("budget", ceiling)
        with self._open(write=True) as (fd, account):
            self._append(fd, "ceiling", "", ceiling, "", max(self._wall(), account.last_time))

    def reserve(
        self,
        estimate: Decimal,
        ceiling: Decimal | None = None,
        note: str = "",
        asked: str | None = None,
        advise: Callable[[Decimal], str] = lambda left: f"Reserve at most {money(left)}",
    ) -> tuple[Job, Account]:
        """Write a job's estimate before it starts; returns the job, and the account as it was before.

        Args: a `ceiling` below the log's own holds for this job alone; `asked` and `advise(left)` word a refusal.
        Raises: ConfigError where the estimate and what is spent exceed the ceiling, or the clock is behind the log.
        """
        estimate = exact("estimate", estimate)
        with self._open(write=True) as (fd, account):
            account = account.under(ceiling)
            if estimate > account.left:
                raise ConfigError(
                    asked or f"a reservation of {money(estimate)}",
                    f"must fit the budget of {money(account.ceiling)}, of which {money(account.spent)} is spent or "
                    f"reserved: {money(_UP.subtract(estimate, account.left))} too much",
                    f"{advise(account.left)}; settle jobs that died; or raise the ceiling {_commands()}",
                )
            wall = self._wall()
            if (account.last_time - wall).total_seconds() > SKEW_SECONDS:
                raise ConfigError(
                    f"a reservation at {wall:%Y-%m-%d %H:%M:%S} UTC",
                    f"must not be before {account.last_time:%Y-%m-%d %H:%M:%S} UTC, when {self.path} was last written",
                    "Set this machine's clock; if the log's last line is wrong, start another log for what is left",
                )
            job_id = secrets.token_hex(4)
            while job_id in account.jobs:
                job_id = secrets.token_hex(4)
            job = self._append(fd, "reserve", job_id, estimate, note, max(wall, account.last_time))
        return job, account

    def settle(self, job_id: str, actual: Decimal, note: str = "") -> None:
        """Write what a job cost, in place of its reservation. More than was reserved is written too: it was spent.

        Never refused for the clock: a line that would be older than the last gets the last one's time.
        Raises: ConfigError for a job that was never reserved or is settled already.
        """
        actual = exact("actual", actual)
        with self._open(write=True) as (fd, account):
            job = account.jobs.get(job_id)
            if job is None or job.actual is not None:
                unsettled = [job.id for job in account.jobs.values() if job.actual is None]
                raise ConfigError(
                    f"settling job {job_id!r} in {self.path}",
                    "the log has no such job" if job is None else f"it was settled before, at {money(job.actual)}",
                    f"Name one of the jobs not settled: {', '.join(unsettled) or 'there are none'}",
                )
            self._append(fd, "settle", job_id, actual, note, max(self._wall(), account.last_time))

    def _wall(self) -> datetime:
        return datetime.fromtimestamp(self.now(), UTC)

    @contextmanager
    def _open(self, write: bool) -> Iterator[tuple[int, Account]]:
        """The locked file and what it says."""
        try:
            fd = os.open(self.path, (os.O_RDWR | os.O_APPEND if write else os.O_RDONLY) | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise ConfigError(
                f"spend log {self.path}",
                "must exist, and there is none: without one nobody knows what was spent",
                f"Make one with its ceiling: `{command_text('budget')} init --budget 3.00 "
                f"--spend-log {self.path}`, or name another with spend_log=PATH or {LOG_VARIABLE}",
            ) from error
        except OSError as error:
            raise self._unusable(error) from error
        try:
            self._lock(fd, exclusive=write)
            yield fd, self._verify(fd)
        finally:
            os.close(fd)  # and with it the lock

    def _lock(self, fd: int, exclusive: bool) -> None:
        if fcntl is None:
            raise self._error("this system has no file locks (fcntl)", "Use Linux or macOS")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        except OSError as error:
            raise self._unusable(error) from error

    def _verify(self, fd: int) -> Account:
        """What the lines add up to, each of which must follow from those before it."""
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise self._error("must be a file", "Name a file")
        try:
            content = b"".join(iter(lambda: os.read(fd, 1 << 20), b""))
        except OSError as error:
            raise self._unusable(error) from error
        *lines, tail = content.split(b"\n")
        if tail:
            raise self._error(
                f"its last line is cut off; the {len(lines)} whole lines before it are all there",
                f"Cut the file after its first {len(content) - len(tail)} bytes; the rest was never a whole line",
            )
        ceiling, last = None, datetime.fromtimestamp(0, UTC)
        jobs: dict = {}
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                kind, amount, when = record["kind"], exact("amount", record["amount"]), _time(record["time"])
                job = Job(record["job"], amount, None, when, *(record[name] for name in ("host", "pid", "note")))
                if [*map(type, (job.id, job.host, job.pid, job.note))] != [str, str, int, str]:
                    raise TypeError(line)
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise self._error(f"line {number} is damaged") from error
            known = jobs.get(job.id)
            if when < last:
                raise self._error(f"line {number} is older than the line before it")
            if kind == "ceiling":
                ceiling = amount
            elif kind == "reserve" and ceiling is not None and known is None:
                jobs[job.id] = job
            elif kind == "settle" and known is not None and known.actual is None:
                jobs[job.id] = replace(known, actual=amount)
            else:
                raise self._error(f"line {number} does not follow from those before it")
            last = when
        if ceiling is None:
            raise self._error("it is empty")
        return Account(ceiling, jobs, last)

    def _append(self, fd: int, kind: str, job: str, amount: Decimal, note: str, when: datetime) -> Job:
        """One line, on disk before this returns."""
        record = {
            "kind": kind,
            "job": job,
            "amount": plain(amount),
            "time": when.isoformat(timespec="microseconds"),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "note": note,
        }
        line = json.dumps(record).encode("ascii") + b"\n"
        try:
            size = os.fstat(fd).st_size
            try:
                written = os.write(fd, line)
            except OSError:
                written = 0
            if written < len(line):
                os.ftruncate(fd, size)
                raise self._error("the disk did not take another line", "Make room on it")
            os.fsync(fd)
        except OSError as error:
            raise self._unusable(error) from error
        return Job(job, amount, None, when, record["host"], record["pid"], note)

    def _error(self, required: str, remedy: str | None = None) -> ConfigError:
        return ConfigError(f"spend log {self.path}", required, remedy or _lost())

    def _unusable(self, error: OSError) -> ConfigError:
        return self._error(f"it cannot be used ({error.strerror})", "Name a file that you may read and write")


def _time(text: str) -> datetime:
    """Raises: ValueError for a time without its zone, which could not be compared."""
    found = datetime.fromisoformat(text)
    if found.tzinfo is None:
        raise ValueError(text)
    return found


# ---- a running job ----


class BudgetClock:
    """What a running job has cost so far, and whether it must stop.

    The price is that of one device, an hour. Time is that of `now`, which must not jump (monotonic, in seconds), from
    when this object is made: what a machine costs before and after is not seen. Where the clock does go back, what
    was measured stays. Monotonic clocks may stand still while a machine sleeps.
    """

    def __init__(
        self,
        price_per_hour: Decimal,
        num_devices: int,
        reserved: Decimal,
        max_seconds: float | None = None,
        now: Callable[[], float] = time.monotonic,
    ):
        self.price_per_hour = exact("price_per_hour", price_per_hour)
        self.num_devices, self.reserved = _whole("num_devices", num_devices), exact("reserved", reserved)
        if max_seconds is not None and not 0 < max_seconds < math.inf:
            raise ConfigError(f"max_seconds={max_seconds}", "must be a time above 0", "Use max_seconds=3600.0")
        self.max_seconds, self._now = max_seconds, now
        self._start, self._elapsed, self._ended = now(), 0.0, False

    def seconds(self) -> float:
        if not self._ended:
            self._elapsed = max(self._elapsed, self._now() - self._start)
        return self._elapsed

    def end(self, seconds: float) -> None:
        """The job ended so many seconds after its start, if not now; from here on the clock stands still."""
        self._elapsed, self._ended = min(seconds, self.seconds()), True

    def seconds_left(self) -> float:
        """Until time or money is used up; negative afterwards, infinite where nothing bounds the job."""
        bounds = [] if self.max_seconds is None else [self.max_seconds]
        if self.price_per_hour > 0:
            bounds.append(float(self.reserved / self.price_per_hour / self.num_devices * 3600))
        return min(bounds, default=math.inf) - self.seconds()

    def spent(self, ahead_seconds: float = 0.0) -> Decimal:
        """Cost so far, or `ahead_seconds` from now, rounded up to a `UNIT`."""
        return cost_of_seconds(self.price_per_hour, self.num_devices, self.seconds() + ahead_seconds)

    def exceeded(self, ahead_seconds: float = 0.0) -> bool:
        """Whether time or money is used up, or would be passed `ahead_seconds` from now. Free devices cost no money."""
        late = self.max_seconds is not None and (
            self.seconds() >= self.max_seconds or self.seconds() + ahead_seconds > self.max_seconds
        )
        costly = self.price_per_hour > 0 and (
            self.spent() >= self.reserved or self.spent(ahead_seconds) > self.reserved
        )
        return late or costly


class JobBudget:
    """One job under a budget, as a context: reserved by `begin_job`, settled with its actual cost on every way out.

    Inside, the first of `signals` to come is kept in `self.signal` for the job to stop by itself; the next one ends it
    at once, by SystemExit. A job killed otherwise is not settled, and its whole reservation stays counted.
    `announcement`: what it may cost, a sentence a line, to be said before it starts.
    """

    def __init__(
        self, log: SpendLog, job: Job, clock: BudgetClock, signals: tuple[int, ...], announcement: Sequence[str] = ()
    ):
        self.log, self.job, self.clock, self.announcement = log, job, clock, announcement
        self._signals = Signals(signals)
        self._last_look: float | None = None
        self._longest = 0.0

    def stop_reason(self) -> str | None:
        """Asked before each step: why it must not start, or None.

        A step that would take as long as the longest so far (asking to asking) must still fit.
        """
        now = self.clock.seconds()
        if self._last_look is not None:
            self._longest = max(self._longest, now - self._last_look)
        self._last_look = now
        if self._signals.reason is not None:
            return self._signals.reason
        if self.clock.exceeded(ahead_seconds=self._longest):
            return f"the budget is used up: {self.report()}"
        return None

    def report(self) -> str:
        return f"{money(self.clock.spent())} of {money(self.job.reserved)} reserved, in {self.clock.seconds():.1f} s"

    @property
    def signal(self) -> int | None:
        return self._signals.number

    def __enter__(self) -> Self:
        self._signals.__enter__()
        return self

    def __exit__(self, *_) -> None:
        self._signals.ignored = True
        try:
            self.log.settle(self.job.id, self.clock.spent())
        finally:
            self._signals.__exit__()


def is_asked_for(*flags: str | None, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a budget's flag or variable is set at all. One is enough: half a budget is refused, not ignored."""
    return any(flag is not None for flag in (*flags, environ.get(BUDGET_VARIABLE), environ.get(LOG_VARIABLE)))


def find_log(spend_log: str | None, environ: Mapping[str, str] = os.environ) -> SpendLog:
    """The log that the flag names, else the variable, else `spend.jsonl` in the working folder."""
    named = environ.get(LOG_VARIABLE, DEFAULT_LOG) if spend_log is None else spend_log
    if not named:
        raise ConfigError("a spend log without a name", "must be named", f"Name one, as in {DEFAULT_LOG}")
    return SpendLog(named)


def find_ceiling(budget: str | None, environ: Mapping[str, str] = os.environ) -> Decimal | None:
    """The amount that the flag names, else the variable; None for the log's own ceiling."""
    named = environ.get(BUDGET_VARIABLE) if budget is None else budget
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

    Args: `price_per_hour` of one device; a `ceiling` below the log's own holds for this job alone; `now` measures it.
    Raises: ConfigError where anything is missing or wrong, the log cannot be trusted, or the budget is too small.
    """
    num_devices = _whole("num_devices", num_devices)
    if price_per_hour is None:
        raise ConfigError(
            "a budget without a price", "the estimate must have one", "Give price_per_hour=0.35, of one device"
        )
    price = exact("price_per_hour", price_per_hour)
    if hours is not None:
        limit = exact("hours", hours)
        if not limit:
            raise ConfigError("hours=0", "a job takes time, so it must be above 0", "Use hours=0.1 or more")
    else:
        if not price:
            raise ConfigError("a price of 0 and no hours", "something must stop the job", "Give a number of hours")
        account = log.read().under(ceiling)
        limit = affordable_hours(price, num_devices, account.left)
        if not limit:
            raise ConfigError(
                "a job for the whole rest of the budget",
                f"some of the {money(account.ceiling)} must be left, and {money(account.spent)} is spent or reserved",
                f"Settle jobs that died, or raise the ceiling {_commands()}",
            )
    estimate = cost(price, num_devices, limit)

    def advise(left: Decimal) -> str:
        hours = affordable_hours(price, num_devices, left) if price else _NOTHING
        return f"Use at most {plain(hours)} h or fewer devices" if hours else "Wait for running jobs to end"

    asked = sentence(price, num_devices, limit).removesuffix(".")
    job, before = log.reserve(estimate, ceiling, note, asked=asked, advise=advise)
    clock = BudgetClock(price, num_devices, estimate, float(limit) * 3600, now)
    said = ["No hours were given: the whole rest of the budget is reserved."] if hours is None else []
    said.append(sentence(price, num_devices, limit, before.ceiling, before.spent))
    return JobBudget(log, job, clock, signals, said)


def _whole(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**6:
        raise ConfigError(f"{name}={value!r}", "must be a whole number from 1 to 1,000,000", f"Use {name}=1")
    return value
