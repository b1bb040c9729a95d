"""The budget guard: what is refused, what is counted, and that every way out of a job writes what it cost.

Nothing here waits for a clock: the wall clock and the monotonic one are arguments.
"""

import decimal
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import experiments.budget
import experiments.train
from experiments.budget import Ceiling, Init, Run, Settle, Show
from experiments.cli import EXIT_BUDGET, run_program
from jaxdist.errors import ConfigError
from jaxdist.runtime.budget import (
    UNIT,
    BudgetClock,
    SpendLog,
    begin_job,
    cost,
    cost_of_seconds,
    exact,
    find_ceiling,
    money,
    money_range,
)

NOON = 1_800_000_000.0
DIES = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


def dollars(text: str) -> Decimal:
    return Decimal(text)


@pytest.fixture
def log(tmp_path) -> SpendLog:
    log = SpendLog(tmp_path / "spend.jsonl", now=lambda: NOON)
    log.create(dollars("3.00"))
    return log


def begin(log: SpendLog, price="0.35", hours="3", num_devices=2, budget=None, environ=MappingProxyType({}), **more):
    """A job on `log`, alone in its environment."""
    return begin_job(log, num_devices, price, hours, find_ceiling(budget, environ), **more)


# ---------------------------------------------------------------------------------------------------------------------
# Amounts
# ---------------------------------------------------------------------------------------------------------------------


NO_TEXTS = ["-1", "-0.01", "NaN", "nan", "inf", "-inf", "Infinity", "1e3", "1_000", " 1", "1,5", "$3", "", "１", "3\n"]
NO_TEXTS += ["0.0000001", "1000000000000.000001", "0." + "0" * 80 + "1"]
NO_NUMBERS = [0.1, float("nan"), float("inf"), None, -1, 10**13]
NO_DECIMALS = [Decimal(text) for text in ("NaN", "sNaN", "-0.01", "Infinity", "1e-7")]


@pytest.mark.parametrize("wrong", [*NO_TEXTS, *NO_NUMBERS, *NO_DECIMALS])
def test_what_is_no_amount(log, wrong):
    with pytest.raises(ConfigError, match="exact number from 0 to"):
        exact("budget", wrong)
    with pytest.raises(ConfigError):
        log.reserve(wrong)
    assert log.read().jobs == {}


def test_amounts_are_what_was_written():
    for text in ("0", "3", "3.00", "0.35", "0.000001", "1000000000000", "0.1" + "0" * 90):
        assert exact("budget", text) == Decimal(text)
    assert exact("budget", Decimal("-0")).is_signed() is False


def test_a_cost_is_rounded_up_and_ignores_the_callers_decimal_context():
    third = Decimal(1) / Decimal(3)
    with decimal.localcontext() as context:
        context.prec, context.rounding = 3, decimal.ROUND_DOWN
        assert cost(dollars("0.35"), 2, dollars("3")) == dollars("2.1")
        assert cost(dollars("1"), 1, third) == dollars("0.333334")
        assert cost_of_seconds(dollars("0.36"), 2, 100.0) == dollars("0.02")
        assert cost_of_seconds(dollars("0.35"), 2, 3600.0 + 1e-9) == dollars("0.700001")
        assert cost(dollars("123456.789012"), 7, dollars("1")) == dollars("864197.523084")
        assert money(dollars("864197.523084")) == "$864,197.523084"
        assert exact("budget", "864197.523084") == dollars("864197.523084")


def test_a_range_is_rounded_outwards():
    assert money_range(1.001, 2.001) == "$1.00 to $2.01"


# ---------------------------------------------------------------------------------------------------------------------
# The ceiling
# ---------------------------------------------------------------------------------------------------------------------


def test_exactly_the_ceiling_is_allowed(log):
    log.reserve(dollars("3.00"))
    assert log.spent() == dollars("3.00") and log.read().left == 0
    log.reserve(dollars("0"))


def test_jobs_add_up(log):
    first, _ = log.reserve(dollars("2.10"))
    log.reserve(dollars("0.90"))
    with pytest.raises(ConfigError, match=r"\$3.00 is spent or reserved"):
        log.reserve(UNIT)
    log.settle(first.id, dollars("1.50"))  # what it did not use is free again
    assert log.spent() == dollars("2.40")
    log.reserve(dollars("0.60"))
    with pytest.raises(ConfigError):
        log.reserve(UNIT)


def test_a_jobs_own_ceiling_is_at_most_the_logs(log):
    with pytest.raises(ConfigError, match="too much"):
        log.reserve(dollars("2.01"), ceiling=dollars("2"))
    log.reserve(dollars("2.00"), ceiling=dollars("2"))
    with pytest.raises(ConfigError, match="ceiling --budget 4"):
        log.reserve(dollars("0.01"), ceiling=dollars("4.00"))
    log.set_ceiling(dollars("4.00"))
    log.reserve(dollars("2.00"), ceiling=dollars("4.00"))


AMOUNTS = st.integers(0, 4_000_000).map(lambda n: n * UNIT)
STEPS = st.lists(st.one_of(AMOUNTS, st.tuples(st.integers(0, 9), AMOUNTS)), max_size=12)


@given(STEPS, st.booleans())
@settings(max_examples=60, deadline=None)
def test_no_sequence_of_jobs_passes_the_ceiling(steps, keep_to_reservation):
    """An amount reserves it, (k, amount) settles the k-th job; what settles above its reservation is all there is."""
    ceiling, jobs = 3_000_000 * UNIT, {}
    with tempfile.TemporaryDirectory() as folder, mock.patch("os.fsync"):
        log = SpendLog(Path(folder) / "spend.jsonl", now=lambda: NOON)
        log.create(ceiling)
        for step in steps:
            counted = sum((max_or(job) for job in jobs.values()), Decimal(0))
            if isinstance(step, Decimal):
                if counted + step <= ceiling:
                    job, _ = log.reserve(step)
                    jobs[job.id] = [step, None]
                else:
                    with pytest.raises(ConfigError):
                        log.reserve(step)
            elif step[0] < len(jobs):
                job_id = list(jobs)[step[0]]
                reserved, actual = jobs[job_id]
                paid = min(step[1], reserved) if keep_to_reservation else step[1]
                if actual is None:
                    log.settle(job_id, paid)
                    jobs[job_id][1] = paid
                else:
                    with pytest.raises(ConfigError):
                        log.settle(job_id, paid)
            spent = SpendLog(log.path).spent()
            over = sum(
                (max(actual - reserved, 0) for reserved, actual in jobs.values() if actual is not None), Decimal(0)
            )
            assert spent == sum((max_or(job) for job in jobs.values()), Decimal(0))
            assert spent <= ceiling + over
            assert not (keep_to_reservation and over)


def max_or(job) -> Decimal:
    reserved, actual = job
    return reserved if actual is None else actual


# ---------------------------------------------------------------------------------------------------------------------
# Two at once, and one that dies
# ---------------------------------------------------------------------------------------------------------------------

RACER = """
import sys
from jaxdist.errors import ConfigError
from jaxdist.runtime.budget import Decimal, SpendLog
log, won = SpendLog(sys.argv[1]), 0
print("ready", flush=True)
sys.stdin.readline()
for _ in range(int(sys.argv[3])):
    try:
        log.reserve(Decimal(sys.argv[2]))
        won += 1
    except ConfigError as error:
        assert "too much" in str(error), error
print(won)
assert "jax" not in sys.modules, "the budget needs no JAX"
"""


def race(log: SpendLog, num_processes: int, amount: str, times: int) -> list[int]:
    """Reservations that each of several processes got, all let go at once."""
    command = [sys.executable, "-c", RACER, str(log.path), amount, str(times)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    racers = [subprocess.Popen(command, **pipes) for _ in range(num_processes)]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    won = [int(racer.communicate()[0]) for racer in racers]
    assert all(racer.returncode == 0 for racer in racers)
    return won


def test_of_two_jobs_at_once_one_wins(tmp_path):
    log = SpendLog(tmp_path / "spend.jsonl")
    log.create(dollars("3.00"))
    assert sorted(race(log, 2, "2.10", 1)) == [0, 1]
    assert log.spent() == dollars("2.10")


def test_many_jobs_at_once_fill_the_ceiling_exactly(tmp_path):
    log = SpendLog(tmp_path / "spend.jsonl")
    log.create(dollars("1.00"))
    assert sum(race(log, 4, "0.01", 40)) == 100
    assert log.spent() == dollars("1.00") and len(log.read().jobs) == 100


def test_a_job_that_dies_keeps_its_estimate_until_settled_by_hand(log):
    code = (
        "import sys; from jaxdist.runtime.budget import *\n"
        f"with begin_job(SpendLog(sys.argv[1], lambda: {NOON}), 2, '0.35', '3'): {DIES}"
    )
    done = subprocess.run([sys.executable, "-c", code, str(log.path)])
    assert done.returncode == -signal.SIGKILL
    assert log.spent() == dollars("2.10")
    (job,) = log.read().jobs.values()
    assert job.actual is None
    log.settle(job.id, dollars("0.70"), note="by hand")
    assert log.spent() == dollars("0.70")
    with pytest.raises(ConfigError, match=r"settled before, at \$0.70"):
        log.settle(job.id, dollars("0"))
    with pytest.raises(ConfigError, match="no such job"):
        log.settle("nobody", dollars("0"))


# ---------------------------------------------------------------------------------------------------------------------
# A log that cannot be trusted
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def full_log(log) -> SpendLog:
    """Four lines: the ceiling, two reservations, one of them settled."""
    first, _ = log.reserve(dollars("1"))
    log.reserve(dollars("0.5"))
    log.settle(first.id, dollars("0.25"))
    return log


def assert_refused(log: SpendLog) -> None:
    """Nothing can be read, reserved, settled or changed, and nothing is written."""
    before = log.path.read_bytes() if os.path.isfile(log.path) else None
    for attempt in (
        log.read,
        lambda: log.reserve(UNIT),
        lambda: log.settle("x", UNIT),
        lambda: log.set_ceiling(dollars("9")),
        lambda: log.create(dollars("9")),
        lambda: begin(log),
    ):
        with pytest.raises(ConfigError):
            attempt()
    assert before == (log.path.read_bytes() if os.path.isfile(log.path) else None)


def test_a_log_cut_inside_a_line_is_refused(full_log):
    content = full_log.path.read_bytes()
    for size in range(len(content)):
        if size == 0 or content[size - 1 : size] != b"\n":
            full_log.path.write_bytes(content[:size])
            with pytest.raises(ConfigError):
                full_log.read()
    assert_refused(full_log)


def test_lines_that_do_not_follow_from_those_before_are_refused(full_log):
    a, b, c, d = lines = full_log.path.read_bytes().splitlines(keepends=True)
    for wrong in (
        [b, c, d],
        [a, c, d],
        [a, b, c, c, d],
        [a, b, c, d, d],
        [a, b, c, d, b"\n"],
        [a, b, b"[" * 9999 + b"\n"],
    ):
        full_log.path.write_bytes(b"".join(wrong))
        assert_refused(full_log)
    for field, value in [
        ("job", ["x"]),
        ("job", 1),
        ("host", 3),
        ("pid", "p"),
        ("note", None),
        ("amount", "-1"),
        ("amount", 0.5),
        ("amount", "nan"),
        ("time", "2026"),
        ("time", 3),
        ("kind", []),
    ]:
        full_log.path.write_bytes(b"".join([a, b, c, json.dumps(json.loads(d) | {field: value}).encode() + b"\n"]))
        assert_refused(full_log)
    full_log.path.write_bytes(b"".join(lines))
    assert full_log.spent() == dollars("0.75")


def test_a_log_of_an_earlier_version_is_read(full_log):
    """Which numbered its lines and held hashes of them."""
    lines = [json.loads(line) for line in full_log.path.read_text().splitlines()]
    old = [{"line": number, **line, "previous": "", "hash": "3f"} for number, line in enumerate(lines, 1)]
    full_log.path.write_text("".join(json.dumps(line) + "\n" for line in old))
    assert full_log.spent() == dollars("0.75")
    full_log.reserve(dollars("1"))
    assert full_log.spent() == dollars("1.75")


@pytest.mark.parametrize("short", [0, 10, None])
def test_a_full_disk_leaves_the_log_whole(log, monkeypatch, short):
    content, write = log.path.read_bytes(), os.write

    def full(fd, line):
        if short is None:
            raise OSError(28, "No space left on device")
        return write(fd, line[:short])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(ConfigError, match="did not take another line"):
            log.reserve(UNIT)
    assert log.path.read_bytes() == content
    log.reserve(UNIT)


# ---------------------------------------------------------------------------------------------------------------------
# Clocks
# ---------------------------------------------------------------------------------------------------------------------


def clock(price="0.36", num_devices=1, reserved="1", max_seconds=None):
    """A clock of one cent in 100 s, and the list whose last entry is the time."""
    times = [100.0]
    return BudgetClock(dollars(price), num_devices, dollars(reserved), max_seconds, lambda: times[-1]), times


def test_the_clock_stops_at_its_money_and_at_its_time():
    run, times = clock(reserved="0.01")
    times.append(199.9)
    assert not run.exceeded()
    assert run.exceeded(ahead_seconds=1.0) and not run.exceeded(ahead_seconds=0.005)
    times.append(200.0)
    assert run.exceeded()
    run, times = clock(max_seconds=50.0)
    times.append(149.0)
    assert not run.exceeded() and not run.exceeded(ahead_seconds=1.0) and run.exceeded(ahead_seconds=1.5)
    times.append(150.0)
    assert run.exceeded()


# ---------------------------------------------------------------------------------------------------------------------
# A job
# ---------------------------------------------------------------------------------------------------------------------


def test_a_job_says_its_sentence_and_is_settled(log):
    times = [0.0]
    with begin(log, now=lambda: times[-1]) as job:
        assert job.announcement == ["2 × $0.35/h × 3 h = $2.10. Budget $3.00, buffer $0.90."]
        assert log.spent() == dollars("2.10")
        times.append(3600.0)
        assert job.stop_reason() is None
    assert log.spent() == dollars("0.70")
    with begin(log, hours="1") as job:
        assert job.announcement[-1] == (
            "2 × $0.35/h × 1 h = $0.70. Budget $3.00, spent or reserved before $0.70, buffer $1.60."
        )


class Crash(Exception):
    pass


def test_a_job_that_crashes_is_settled(log):
    times = [0.0]
    with pytest.raises(Crash), begin(log, now=lambda: times[-1]):
        times.append(3600.0)
        raise Crash
    assert log.spent() == dollars("0.70")


def test_sigterm_stops_a_job_and_a_second_one_ends_it(log):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, begin(log, now=lambda: 0.0) as job:
        os.kill(os.getpid(), signal.SIGTERM)
        assert job.stop_reason() == "SIGTERM"
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
    assert log.spent() == 0 and signal.getsignal(signal.SIGTERM) == before


# ---------------------------------------------------------------------------------------------------------------------
# The wrapper
# ---------------------------------------------------------------------------------------------------------------------


def wrap(log: SpendLog, *command, now=lambda: 0.0, grace="30", hours="3", console=None) -> int:
    flags = Run("0.35", 2, hours, spend_log=str(log.path), grace=grace)
    return experiments.budget.run(flags, list(map(str, command)), console or Console(quiet=True), now)


def jump_once(path: Path):
    """A clock that stands still until the file exists; then it jumps by 1000 hours at every look."""
    ticks = [0.0]

    def now() -> float:
        if path.exists():
            ticks.append(ticks[-1] + 3.6e6)
        return ticks[-1]

    return now


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.fixture(autouse=True)
def fast_and_alone(monkeypatch):
    monkeypatch.setattr(experiments.budget, "POLL_SECONDS", 0.01)
    monkeypatch.delenv("JAXDIST_BUDGET", raising=False)
    monkeypatch.delenv("JAXDIST_SPEND_LOG", raising=False)


@pytest.fixture
def now_log(tmp_path):
    """The wrapper dates lines by the real clock."""
    log = SpendLog(tmp_path / "spend.jsonl")
    log.create(dollars("3.00"))
    return log


@pytest.mark.parametrize(("code", "expected"), [("", 0), ("raise SystemExit(7)", 7), (DIES, 128 + 9)])
def test_the_wrapper_gives_the_commands_exit_code(now_log, code, expected):
    times = iter([0.0, *[3600.0] * 1000])
    assert wrap(now_log, *python(code), now=lambda: next(times)) == expected
    (job,) = now_log.read().jobs.values()
    assert job.reserved == dollars("2.10") and job.actual == dollars("0.70")


def test_the_wrapper_stops_a_command_that_may_save(now_log, tmp_path):
    code = (
        "import signal, sys, time; from pathlib import Path; "
        "signal.signal(signal.SIGTERM, lambda *_: (Path(sys.argv[2]).touch(), sys.exit(0))); "
        "Path(sys.argv[1]).touch(); time.sleep(200)"
    )
    ready, saved, ticks = tmp_path / "ready", tmp_path / "saved", [0.0]
    limit = 3 * 3600 - 29  # the grace of 30 s is part of the time
    now = lambda: limit if ready.exists() else ticks[-1]  # noqa: E731
    assert wrap(now_log, *python(code), ready, saved, now=now) == EXIT_BUDGET
    assert saved.exists()
    assert now_log.spent() == cost_of_seconds(dollars("0.35"), 2, limit)


def test_the_wrapper_kills_a_command_that_will_not_stop_and_its_children(now_log, tmp_path):
    code = (
        "import os, signal, sys, time; from pathlib import Path\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = os.fork()\n"
        "if child: Path(sys.argv[1] + '.new').write_text(str(child)); os.rename(sys.argv[1] + '.new', sys.argv[1])\n"
        "time.sleep(200)"
    )
    ready = tmp_path / "ready"
    assert wrap(now_log, *python(code), ready, now=jump_once(ready)) == EXIT_BUDGET
    wait_until_gone(int(ready.read_text()))


def test_the_wrapper_leaves_nothing_of_its_group_behind(now_log, tmp_path):
    pid = tmp_path / "pid"
    assert wrap(now_log, "sh", "-c", f"sleep 200 & echo $! > {pid}") == 0
    wait_until_gone(int(pid.read_text()))


def wait_until_gone(pid: int) -> None:
    """Or a zombie, where nobody collects orphans."""
    while True:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
            os.kill(pid, 0)
        except (FileNotFoundError, ProcessLookupError):
            return


# ---------------------------------------------------------------------------------------------------------------------
# The programs as a user meets them
# ---------------------------------------------------------------------------------------------------------------------


def program(capfd, *words) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `python -m experiments.budget WORDS`, in this process."""
    split = words.index("--") if "--" in words else len(words)
    with pytest.raises(SystemExit) as stop:
        run_program(
            Init | Ceiling | Show | Settle | Run,
            lambda flags, console: experiments.budget.main(flags, console, list(words[split + 1 :])),
            "budget",
            args=list(map(str, words[:split])),
        )
    return stop.value.code or 0, *capfd.readouterr()


def test_a_budget_by_hand(capfd, tmp_path):
    log = ["--spend-log", tmp_path / "log"]
    assert program(capfd, "init", "--budget", "3.00", *log)[0] == 0
    code, out, _ = program(
        capfd, "run", "--price-per-hour", "0.35", "--devices", "2", "--hours", "3", *log, "--", "echo", "the command"
    )
    said = out.splitlines()
    assert code == 0 and said[:2] == ["2 × $0.35/h × 3 h = $2.10. Budget $3.00, buffer $0.90.", "the command"]
    code, _, err = program(
        capfd, "run", "--price-per-hour", "0.35", "--devices", "2", "--hours", "5", *log, "--", "echo", "no"
    )
    assert code == 2 and "2 × $0.35/h × 5 h = $3.50" in err and "too much" in err
    job, _ = SpendLog(tmp_path / "log").reserve(dollars("1.25"))
    assert "not settled" in program(capfd, "show", *log)[1]
    code, out, _ = program(capfd, "settle", "--job", job.id, "--actual", "0.75", *log)
    assert code == 0 and "$0.75" in out and "not settled" not in out
    code, out, _ = program(capfd, "ceiling", "--budget", "4", *log)
    assert code == 0 and "budget $4.00" in out


SMALL = ["--num-layers", "1", "--width", "16", "--num-heads", "2", "--seq-len", "16", "--batch-size", "4"]


@pytest.fixture
def train(monkeypatch, capfd, tmp_path):
    """(exit code, stdout, stderr) of `python -m experiments.train`, with a folder to write to."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 400)

    def run(*args, **more) -> tuple[int, str, str]:
        words = ["train", "--data", tmp_path / "text.txt", "--out", tmp_path / "run", *SMALL, *args]
        monkeypatch.setattr(sys, "argv", list(map(str, words)))
        with pytest.raises(SystemExit) as stop:
            main = experiments.train.main
            run_program(experiments.train.TrainFlags, lambda flags, console: main(flags, console, **more), "train")
        return stop.value.code or 0, *capfd.readouterr()

    return run


def test_train_over_budget_is_refused_before_anything_is_traced(train, monkeypatch, now_log, tmp_path):
    monkeypatch.setattr(experiments.train, "print_resolved", lambda *_: pytest.fail("got as far as running"))
    guard = ["--mesh", "dp=2", "--price-per-hour", "0.35", "--spend-log", now_log.path]
    code, out, err = train(*guard, "--max-hours", "4.3")
    assert code == 2 and not out and "2 × $0.35/h × 4.3 h = $3.01: " in err
    for args, said in (
        (["--budget", "3"], "--price-per-hour"),
        (["--max-hours", "3"], "--price-per-hour"),
        (["--price-per-hour", "1"], "budget init"),
        ([*guard, "--budget", "5"], "budget of $5"),
        ([*guard, "--max-hours", "nan"], "hours=nan"),
    ):
        monkeypatch.chdir(tmp_path / "..")
        code, out, err = train(*args)
        assert code == 2 and not out and said in err and "Traceback" not in err
    monkeypatch.setenv("JAXDIST_BUDGET", "3")
    assert "--price-per-hour" in train()[2]
    assert now_log.spent() == 0 and not (tmp_path / "run").exists()


@pytest.mark.parametrize("stop", ["time", pytest.param("SIGTERM", marks=pytest.mark.exhaustive)])
def test_train_stops_between_steps_saves_and_settles(train, now_log, tmp_path, stop):
    """Three steps in, the clock stands at two hours and 59 minutes, or a signal comes."""
    metrics, sent = tmp_path / "run" / "metrics.jsonl", []

    def now() -> float:
        late = metrics.exists() and len(metrics.read_text().splitlines()) == 3
        if late and stop == "SIGTERM" and not sent:  # a second one would end it at once
            sent.append(True)
            os.kill(os.getpid(), signal.SIGTERM)
        return 10740.0 if late else 0.0

    guard = ["--mesh", "dp=2", "--price-per-hour", "0.35", "--max-hours", "3", "--spend-log", now_log.path]
    code, out, _ = train(*guard, "--steps", "50", now=now)
    assert code == (EXIT_BUDGET if stop == "time" else 128 + signal.SIGTERM)
    assert "stopped after 3 of 50 steps" in out and "the newest checkpoint is of step 3" in out
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000003"]
    assert len(metrics.read_text().splitlines()) == 3
    stopped = json.loads((tmp_path / "run" / "stopped.json").read_text())
    assert stopped["steps"] == 3 and stopped["of"] == 50 and stopped["reason"]
    assert not (tmp_path / "run" / "summary.json").exists()
    assert now_log.spent() == dollars("2.088334")


# ---- the guard has a guard ----

# Says its number, ignores SIGTERM and sleeps.
DEAF = (
    "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print(os.getpid(), flush=True); time.sleep(200)"
)


def guarding(log: SpendLog, hours: str, grace: str = "0.2") -> tuple[subprocess.Popen, int]:
    """A guard in a process of its own, and the number of its command's process."""
    words = ["run", "--price-per-hour", "0.35", "--hours", hours, "--grace", grace, "--spend-log", str(log.path)]
    command = [sys.executable, "-m", "experiments.budget", *words, "--", *python(DEAF)]
    guard = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        preexec_fn=lambda: signal.signal(signal.SIGQUIT, signal.SIG_DFL),  # shells' background jobs ignore it
    )
    for line in guard.stdout:
        if line.strip().isdigit():
            return guard, int(line)
    raise AssertionError("the command did not start")


def test_a_command_that_does_not_listen_costs_no_more_than_was_reserved(now_log):
    guard, child = guarding(now_log, hours="0.0005")  # 1.8 s
    assert guard.wait(60) == EXIT_BUDGET
    wait_until_gone(child)
    (job,) = now_log.read().jobs.values()
    assert 0 < job.actual <= job.reserved


def test_a_guard_that_is_stopped_still_ends_its_command_in_time(now_log):
    guard, child = guarding(now_log, hours="0.0005")
    guard.send_signal(signal.SIGSTOP)
    wait_until_gone(child)
    guard.send_signal(signal.SIGCONT)
    assert guard.wait(60) == EXIT_BUDGET
    (job,) = now_log.read().jobs.values()
    assert 0 < job.actual <= job.reserved  # by the warden's clock: how long the guard itself stood still does not count


@pytest.mark.parametrize(("number", "settled"), [(signal.SIGKILL, False), (signal.SIGQUIT, True)])
def test_a_command_does_not_outlive_its_guard(now_log, number, settled):
    guard, child = guarding(now_log, hours="1")
    guard.send_signal(number)
    assert guard.wait(60) == (128 + number if settled else -number)
    wait_until_gone(child)
    (job,) = now_log.read().jobs.values()
    assert (job.actual is not None) == settled


@pytest.mark.parametrize("above", [dollars("0.01"), UNIT])
def test_anything_above_is_refused(log, above):
    with pytest.raises(ConfigError, match=f"{re.escape(money(above))} too much.*at most .3.00;"):
        log.reserve(dollars("3.00") + above)
    assert log.spent() == 0


def test_more_than_was_reserved_counts_too(log):
    job, _ = log.reserve(dollars("1"))
    log.settle(job.id, dollars("3.50"))
    assert log.spent() == dollars("3.50") and log.read().left == dollars("-0.50")
    with pytest.raises(ConfigError):
        log.reserve(dollars("0"))
    for price, hours in (("0.35", "3"), ("0.35", None), ("0", "3")):
        with pytest.raises(ConfigError, match=r"is spent or reserved.*(Wait|Settle)"):
            begin(log, price, hours)


def test_a_missing_log_is_refused_and_never_made_by_a_job(tmp_path):
    missing = SpendLog(tmp_path / "other.jsonl")
    for attempt in (missing.read, lambda: missing.reserve(UNIT), lambda: missing.settle("x", UNIT)):
        with pytest.raises(ConfigError, match="budget init --budget"):
            attempt()
    assert not missing.path.exists()


def test_a_half_line_at_the_end_is_refused_and_the_remedy_works(full_log):
    content = full_log.path.read_bytes()
    full_log.path.write_bytes(content + b'{"line": 5, "kind"')
    with pytest.raises(ConfigError, match=f"first {len(content)} bytes"):
        full_log.reserve(UNIT)
    os.truncate(full_log.path, len(content))
    full_log.reserve(UNIT)


def test_without_file_locks_nothing_is_reserved(log, monkeypatch):
    monkeypatch.setattr("jaxdist.runtime.budget.fcntl", None)
    assert_refused(log)


def test_a_wall_clock_that_goes_back_refuses_new_jobs_and_settles_old_ones(log):
    job, _ = log.reserve(dollars("1"))
    log.now = lambda: NOON - 3600
    with pytest.raises(ConfigError, match="clock"):
        log.reserve(dollars("1"))
    log.settle(job.id, dollars("0.5"))
    assert log.spent() == dollars("0.5")
    assert json.loads(log.path.read_text().splitlines()[-1])["time"].startswith("2027-01-15T08:00:00")
    log.now = lambda: NOON - 59  # two machines that disagree a little
    log.reserve(dollars("1"))
    log.now = lambda: NOON + 1
    log.reserve(dollars("1"))


def test_the_clock_counts_seconds_and_money():
    run, times = clock(num_devices=2)
    assert run.spent() == 0 and not run.exceeded()
    times.append(200.0)
    assert run.seconds() == 100 and run.spent() == dollars("0.02")
    times.append(200.0 + 1e-9)
    assert run.spent() == dollars("0.020001")  # rounded up


def test_a_clock_that_goes_back_takes_nothing_back():
    run, times = clock(reserved="0.01")
    times.append(190.0)
    assert run.spent() == dollars("0.009")
    times.append(-1e9)
    assert run.spent() == dollars("0.009") and run.seconds() == 90


def test_free_devices_stop_by_time_alone():
    run, times = clock(price="0", reserved="0", max_seconds=10.0)
    assert not run.exceeded()
    times.append(110.0)
    assert run.exceeded() and run.spent() == 0


def test_a_step_that_would_not_fit_is_not_started(log):
    times = [0.0]
    with begin(log, now=lambda: times[-1]) as job:
        for hours in (0.0, 1.0, 1.9):  # the longest step takes an hour
            times.append(hours * 3600)
            assert job.stop_reason() is None
        times.append(2.01 * 3600)
        assert "budget is used up: $1.407 of $2.10 reserved" in job.stop_reason()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"price": None}, "price_per_hour=0.35"),
        ({"price": "-0.35"}, "price_per_hour=-0.35"),
        ({"price": "NaN"}, "price_per_hour=NaN"),
        ({"hours": "-3"}, "hours=-3"),
        ({"hours": "inf"}, "hours=inf"),
        ({"hours": "0"}, "hours=0"),
        ({"price": "0", "hours": None}, "price of 0"),
        ({"num_devices": 0}, "num_devices=0"),
        ({"budget": "nan"}, "budget=nan"),
        ({"budget": "2.09"}, r"2 × \$0.35/h × 3 h = \$2.10: .*\$2.09.*at most 2.985714 h"),
        ({"budget": "3.01"}, r"budget of \$3.01"),
        ({"environ": {"JAXDIST_BUDGET": "2.09"}}, "too much"),
        ({"environ": {"JAXDIST_BUDGET": ""}}, "budget=:"),
        ({"hours": "4.285715"}, "too much"),
    ],
)
def test_a_job_that_cannot_be_reserved(log, wrong, said):
    with pytest.raises(ConfigError, match=said):
        begin(log, **wrong)
    assert log.spent() == 0


def test_what_the_wrapper_runs_is_not_counted_twice(now_log, monkeypatch, capfd):
    monkeypatch.setenv("JAXDIST_BUDGET", "3")
    assert wrap(now_log, *python("import os; print('JAXDIST_BUDGET' in os.environ)")) == 0
    assert capfd.readouterr().out == "False\n"


def test_train_within_its_budget_finishes_and_settles(train, now_log, tmp_path):
    guard = ["--price-per-hour", "0.35", "--max-hours", "3", "--spend-log", now_log.path]
    code, out, _ = train(*guard, "--steps", "2", now=lambda: 0.0)
    assert code == 0 and "done" in out and "cost $0.00 of $1.05 reserved" in out
    (job,) = now_log.read().jobs.values()
    assert job.actual == 0 and (tmp_path / "run" / "summary.json").exists()
