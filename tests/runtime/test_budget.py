"""The budget guard: what is refused, what is counted, and that every way out of a job writes what it cost."""

import json
import os
import re
import signal
import subprocess
import sys
from decimal import Decimal
from functools import partial
from pathlib import Path

import pytest
from support.programs import run

import experiments.budget
import experiments.train
from experiments.entry import EXIT_BUDGET
from jaxdist.errors import ConfigError
from jaxdist.runtime.budget import UNIT, SpendLog, begin_job, cost, exact, find_ceiling, money, money_range

DIES = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture
def log(tmp_path) -> SpendLog:
    log = SpendLog(tmp_path / "spend.jsonl")
    log.create(Decimal("3.00"))
    return log


@pytest.fixture(autouse=True)
def fast_and_alone(monkeypatch):
    monkeypatch.setattr(experiments.budget, "POLL_SECONDS", 0.01)
    monkeypatch.delenv("JAXDIST_BUDGET", raising=False)
    monkeypatch.delenv("JAXDIST_SPEND_LOG", raising=False)


def begin(log: SpendLog, price="0.35", hours="3", num_devices=2, budget=None, **more):
    return begin_job(log, num_devices, price, hours, find_ceiling(budget), **more)


# ---------------------------------------------------------------------------------------------------------------------
# Amounts
# ---------------------------------------------------------------------------------------------------------------------


NO_TEXTS = ["-1", "NaN", "inf", "1e3", "1_000", " 1", "1,5", "$3", "", "１", "3\n", "0.0000001", "1000000000000.000001"]
NO_NUMBERS = [0.1, float("nan"), None, -1, 10**13]
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


def test_a_computed_amount_is_rounded_up():
    assert cost(Decimal("0.35"), 2, 10800) == Decimal("2.1")
    assert cost(Decimal("0.36"), 2, 100.0) == Decimal("0.02")
    assert cost(Decimal("0.35"), 2, 3600.0 + 1e-9) == Decimal("0.700001")
    assert cost(Decimal("123456.789012"), 7, 3600) == Decimal("864197.523084")
    assert money(Decimal("864197.523084")) == "$864,197.523084"
    assert money_range(1.001, 2.001) == "$1.00 to $2.01"


# ---------------------------------------------------------------------------------------------------------------------
# The ceiling
# ---------------------------------------------------------------------------------------------------------------------


def test_jobs_add_up(log):
    first, _ = log.reserve(Decimal("2.10"))
    log.reserve(Decimal("0.90"))  # exactly the ceiling
    assert log.spent() == Decimal("3.00") and log.read().left == 0
    log.reserve(Decimal(0))
    with pytest.raises(ConfigError, match=r"\$3.00 is spent or reserved"):
        log.reserve(UNIT)
    log.settle(first.id, Decimal("1.50"))  # what it did not use is free again
    assert log.spent() == Decimal("2.40")
    log.reserve(Decimal("0.60"))
    with pytest.raises(ConfigError):
        log.reserve(UNIT)


@pytest.mark.parametrize("above", [Decimal("0.01"), UNIT])
def test_anything_above_is_refused(log, above):
    with pytest.raises(ConfigError, match=f"{re.escape(money(above))} too much.*at most .3.00,"):
        log.reserve(Decimal("3.00") + above)
    assert log.spent() == 0


def test_more_than_was_reserved_counts_too(log):
    job, _ = log.reserve(Decimal("1"))
    log.settle(job.id, Decimal("3.50"))
    assert log.spent() == Decimal("3.50") and log.read().left == Decimal("-0.50")
    with pytest.raises(ConfigError):
        log.reserve(Decimal(0))
    for price, hours in (("0.35", "3"), ("0.35", None), ("0", "3")):
        with pytest.raises(ConfigError):
            begin(log, price, hours)


def test_a_jobs_own_ceiling_is_at_most_the_logs(log):
    with pytest.raises(ConfigError, match="too much"):
        log.reserve(Decimal("2.01"), ceiling=Decimal("2"))
    log.reserve(Decimal("2.00"), ceiling=Decimal("2"))
    with pytest.raises(ConfigError, match="ceiling --budget 4"):
        log.reserve(Decimal("0.01"), ceiling=Decimal("4.00"))
    log.set_ceiling(Decimal("4.00"))
    log.reserve(Decimal("2.00"), ceiling=Decimal("4.00"))


RACER = """
import sys
from jaxdist.errors import ConfigError
from jaxdist.runtime.budget import Decimal, SpendLog
log, won = SpendLog(sys.argv[1]), 0
print("ready", flush=True)
sys.stdin.readline()
for _ in range(40):
    try:
        log.reserve(Decimal("0.03"))
        won += 1
    except ConfigError as error:
        assert "too much" in str(error), error
print(won)
assert "jax" not in sys.modules, "the budget needs no JAX"
"""


def test_many_jobs_at_once_fill_the_ceiling_exactly(log):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    racers = [subprocess.Popen([sys.executable, "-c", RACER, str(log.path)], **pipes) for _ in range(4)]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    assert sum(int(racer.communicate()[0]) for racer in racers) == 100
    assert all(racer.returncode == 0 for racer in racers)
    assert log.spent() == Decimal("3.00") and len(log.read().jobs) == 100


def test_a_job_that_dies_keeps_its_estimate_until_settled_by_hand(log):
    code = "import sys; from jaxdist.runtime.budget import *\n"
    code += f"with begin_job(SpendLog(sys.argv[1]), 2, '0.35', '3'): {DIES}"
    done = subprocess.run([sys.executable, "-c", code, str(log.path)])
    assert done.returncode == -signal.SIGKILL
    assert log.spent() == Decimal("2.10")
    (job,) = log.read().jobs.values()
    assert job.actual is None
    log.settle(job.id, Decimal("0.70"), note="by hand")
    assert log.spent() == Decimal("0.70")
    for settled in (job.id, "nobody"):
        with pytest.raises(ConfigError, match="not settled yet"):
            log.settle(settled, Decimal(0))


# ---------------------------------------------------------------------------------------------------------------------
# A log that cannot be trusted
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def full_log(log) -> SpendLog:
    """Four lines: the ceiling, two reservations, one of them settled."""
    first, _ = log.reserve(Decimal("1"))
    log.reserve(Decimal("0.5"))
    log.settle(first.id, Decimal("0.25"))
    return log


def assert_refused(log: SpendLog) -> None:
    """Nothing can be read, reserved, settled or changed, and nothing is written."""
    before = log.path.read_bytes()
    for attempt in (
        log.read,
        lambda: log.reserve(UNIT),
        lambda: log.settle("x", UNIT),
        lambda: log.set_ceiling(Decimal(9)),
        lambda: log.create(Decimal(9)),
        lambda: begin(log),
    ):
        with pytest.raises(ConfigError):
            attempt()
    assert before == log.path.read_bytes()


def test_a_log_cut_inside_a_line_is_refused(full_log):
    content = full_log.path.read_bytes()
    for size in range(len(content)):
        if size == 0 or content[size - 1 : size] != b"\n":
            full_log.path.write_bytes(content[:size])
            with pytest.raises(ConfigError):
                full_log.read()
    assert_refused(full_log)


def test_lines_that_do_not_follow_from_those_before_are_refused(full_log):
    a, b, c, d = full_log.path.read_bytes().splitlines(keepends=True)
    wrong = [[b, c, d], [a, c, d], [a, b, c, c, d], [a, b, c, d, d], [a, b, c, d, b"\n"], [a, b, b"[" * 9999 + b"\n"]]
    fields = {"job": [["x"], 1], "amount": ["-1", 0.5, "nan"], "kind": [[], "paid"]}
    for field, values in fields.items():
        wrong += [[a, b, c, json.dumps(json.loads(d) | {field: value}).encode() + b"\n"] for value in values]
    for lines in wrong:
        full_log.path.write_bytes(b"".join(lines))
        assert_refused(full_log)
    full_log.path.write_bytes(b"".join([a, b, c, d]))
    assert full_log.spent() == Decimal("0.75")


def test_a_log_of_an_earlier_version_is_read(full_log):
    """Which numbered its lines and held hashes of them."""
    lines = [json.loads(line) for line in full_log.path.read_text().splitlines()]
    old = [{"line": number, **line, "previous": "", "hash": "3f"} for number, line in enumerate(lines, 1)]
    full_log.path.write_text("".join(json.dumps(line) + "\n" for line in old))
    assert full_log.spent() == Decimal("0.75")
    full_log.reserve(Decimal("1"))
    assert full_log.spent() == Decimal("1.75")


@pytest.mark.parametrize("short", [0, 10, None])
def test_a_full_disk_leaves_the_log_whole(log, monkeypatch, short):
    content, write = log.path.read_bytes(), os.write

    def full(fd, line):
        if short is None:
            raise OSError(28, "No space left on device")
        return write(fd, line[:short])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(ConfigError, match="No space left"):
            log.reserve(UNIT)
    assert log.path.read_bytes() == content
    log.reserve(UNIT)


def test_a_missing_log_is_refused_and_never_made_by_a_job(tmp_path):
    missing = SpendLog(tmp_path / "other.jsonl")
    for attempt in (missing.read, lambda: missing.reserve(UNIT), lambda: missing.settle("x", UNIT)):
        with pytest.raises(ConfigError, match="budget init --budget"):
            attempt()
    assert not missing.path.exists()


def test_without_file_locks_nothing_is_reserved(log, monkeypatch):
    monkeypatch.setattr("jaxdist.runtime.budget.fcntl", None)
    assert_refused(log)


# ---------------------------------------------------------------------------------------------------------------------
# A job
# ---------------------------------------------------------------------------------------------------------------------


def test_a_job_says_its_sentence_and_is_settled(log):
    times = [0.0]
    with begin(log, now=lambda: times[-1]) as job:
        assert job.announcement == ["2 × $0.35/h × 3 h = $2.10. Budget $3.00, buffer $0.90."]
        assert log.spent() == Decimal("2.10")
        times.append(3600.0)
        assert job.stop_reason() is None
    assert log.spent() == Decimal("0.70")
    with begin(log, hours="1") as job:
        assert job.announcement[-1] == (
            "2 × $0.35/h × 1 h = $0.70. Budget $3.00, spent or reserved before $0.70, buffer $1.60."
        )


def test_a_job_that_crashes_is_settled(log):
    times = [0.0]
    with pytest.raises(ZeroDivisionError), begin(log, now=lambda: times[-1]):
        times.append(3600.0)
        raise ZeroDivisionError
    assert log.spent() == Decimal("0.70")


def test_sigterm_stops_a_job_and_a_second_one_ends_it(log):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, begin(log, now=lambda: 0.0) as job:
        os.kill(os.getpid(), signal.SIGTERM)
        assert job.stop_reason() == "SIGTERM"
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
    assert log.spent() == 0 and signal.getsignal(signal.SIGTERM) == before


def test_a_step_that_would_not_fit_is_not_started(log):
    times = [0.0]
    with begin(log, now=lambda: times[-1]) as job:
        for hours in (0.0, 1.0, 1.9):  # the longest step takes an hour
            times.append(hours * 3600)
            assert job.stop_reason() is None
        assert "the budget is used up" in job.stop_reason(in_flight=1)  # and after it an hour more
        times.append(2.01 * 3600)
        assert "budget is used up: $1.407 of $2.10 reserved" in job.stop_reason()


@pytest.mark.parametrize(("price", "hours"), [("0.35", None), ("0", "0.5")])
def test_a_job_stops_at_its_money_or_at_its_time(log, price, hours):
    """Without hours it may take what the rest of the budget pays for; free devices stop by time alone."""
    seconds, times = 1800.0 if hours else 3600 * 4.285714, [0.0]
    with begin(log, price, hours, now=lambda: times[-1]) as job:
        times.append(seconds - 1)
        assert job.stop_reason() is None and 0 < job.seconds_left() <= 1.01
        times.append(seconds + 0.01)
        assert job.stop_reason()
    assert log.spent() == (0 if hours else Decimal("3.000002"))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"price": None}, "price_per_hour=0.35"),
        ({"price": "-0.35"}, "price_per_hour=-0.35"),
        ({"hours": "inf"}, "hours=inf"),
        ({"hours": "0"}, "hours=0"),
        ({"price": "0", "hours": None}, "price of 0"),
        ({"num_devices": 0}, "num_devices=0"),
        ({"budget": "nan"}, "budget=nan"),
        ({"budget": "2.09"}, r"2 × \$0.35/h × 3 h = \$2.10: .*\$2.09.*at most \$2.09"),
        ({"budget": "3.01"}, r"budget of \$3.01"),
        ({"hours": "4.285715"}, "too much"),
    ],
)
def test_a_job_that_cannot_be_reserved(log, wrong, said):
    with pytest.raises(ConfigError, match=said):
        begin(log, **wrong)
    assert log.spent() == 0


def test_the_variable_is_a_jobs_ceiling(log, monkeypatch):
    for value, said in (("2.09", "too much"), ("", "budget=:")):
        monkeypatch.setenv("JAXDIST_BUDGET", value)
        with pytest.raises(ConfigError, match=said):
            begin(log)


# ---------------------------------------------------------------------------------------------------------------------
# The programs as a user meets them
# ---------------------------------------------------------------------------------------------------------------------


def test_a_budget_by_hand(capfd, tmp_path):
    log, price = ["--spend-log", tmp_path / "log"], ["--price-per-hour", "0.35", "--devices", "2"]
    assert run(capfd, "budget", "init", "--budget", "3.00", *log)[0] == 0
    code, out, _ = run(capfd, "budget", "run", *price, "--hours", "3", *log, "--", "echo", "the command")
    said = out.splitlines()
    assert code == 0 and said[:2] == ["2 × $0.35/h × 3 h = $2.10. Budget $3.00, buffer $0.90.", "the command"]
    code, _, err = run(capfd, "budget", "run", *price, "--hours", "5", *log, "--", "echo", "no")
    assert code == 2 and "2 × $0.35/h × 5 h = $3.50" in err and "too much" in err
    job, _ = SpendLog(tmp_path / "log").reserve(Decimal("1.25"))
    assert "not settled" in run(capfd, "budget", "show", *log)[1]
    code, out, _ = run(capfd, "budget", "settle", "--job", job.id, "--actual", "0.75", *log)
    assert code == 0 and "$0.75" in out and "not settled" not in out
    code, out, _ = run(capfd, "budget", "ceiling", "--budget", "4", *log)
    assert code == 0 and "budget $4.00" in out


def guarded(capfd, log: SpendLog, *command, hours="3", grace="30") -> tuple[int, str]:
    """(exit code, stdout) of a command under `budget run`."""
    words = ["run", "--price-per-hour", "0.35", "--hours", hours, "--grace", grace, "--spend-log", log.path]
    code, out, _ = run(capfd, "budget", *words, "--", *command)
    return code, out


def python(code: str, *args) -> list:
    return [sys.executable, "-c", code, *args]


def assert_settled_within_its_reservation(log: SpendLog) -> None:
    (job,) = log.read().jobs.values()
    assert 0 < job.actual <= job.reserved


@pytest.mark.parametrize(("code", "expected"), [("", 0), ("raise SystemExit(7)", 7), (DIES, 128 + 9)])
def test_the_wrapper_gives_the_commands_exit_code(capfd, log, monkeypatch, code, expected):
    monkeypatch.setenv("JAXDIST_BUDGET", "3")  # what it runs is not counted twice
    counts = "import os; assert 'JAXDIST_BUDGET' not in os.environ; "
    assert guarded(capfd, log, *python(counts + code))[0] == expected
    assert_settled_within_its_reservation(log)


def test_the_wrapper_stops_a_command_that_may_save(capfd, log, tmp_path):
    code = (
        "import signal, sys, time; from pathlib import Path; "
        "signal.signal(signal.SIGTERM, lambda *_: (Path(sys.argv[1]).touch(), sys.exit(0))); time.sleep(200)"
    )
    saved = tmp_path / "saved"
    assert guarded(capfd, log, *python(code, saved), hours="0.01", grace="33")[0] == EXIT_BUDGET  # after 3 of 36 s
    assert saved.exists()
    assert_settled_within_its_reservation(log)


def test_the_wrapper_leaves_nothing_of_its_group_behind(capfd, log, tmp_path):
    pid = tmp_path / "pid"
    assert guarded(capfd, log, "sh", "-c", f"sleep 200 & echo $! > {pid}")[0] == 0
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


# Ignores SIGTERM, says the number of a child that does too, and sleeps.
DEAF = (
    "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); child = os.fork()\n"
    "if child: print(child, flush=True)\n"
    "time.sleep(200)"
)


def guarding(log: SpendLog, hours: str) -> tuple[subprocess.Popen, int]:
    """A guard in a process of its own, and the number of its command's child."""
    words = ["run", "--price-per-hour", "0.35", "--hours", hours, "--grace", "0.2", "--spend-log", str(log.path)]
    guard = subprocess.Popen(
        [sys.executable, "-m", "experiments.budget", *words, "--", *python(DEAF)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        preexec_fn=lambda: signal.signal(signal.SIGQUIT, signal.SIG_DFL),  # shells' background jobs ignore it
    )
    for line in guard.stdout:
        if line.strip().isdigit():
            return guard, int(line)
    raise AssertionError("the command did not start")


@pytest.mark.parametrize("stopped", [False, True])
def test_a_command_that_does_not_listen_costs_no_more_than_was_reserved(log, stopped):
    """Also where the guard itself stands still: by the warden's clock, how long that was does not count."""
    guard, child = guarding(log, hours="0.0005")  # 1.8 s
    if stopped:
        guard.send_signal(signal.SIGSTOP)
        wait_until_gone(child)
        guard.send_signal(signal.SIGCONT)
    assert guard.wait(60) == EXIT_BUDGET
    wait_until_gone(child)
    assert_settled_within_its_reservation(log)


@pytest.mark.parametrize(("number", "settled"), [(signal.SIGKILL, False), (signal.SIGQUIT, True)])
def test_a_command_does_not_outlive_its_guard(log, number, settled):
    guard, child = guarding(log, hours="1")
    guard.send_signal(number)
    assert guard.wait(60) == (128 + number if settled else -number)
    wait_until_gone(child)
    (job,) = log.read().jobs.values()
    assert (job.actual is not None) == settled


SMALL = ["--num-layers", "1", "--width", "16", "--num-heads", "2", "--seq-len", "16", "--batch-size", "4"]


@pytest.fixture
def train(capfd, tmp_path):
    """(exit code, stdout, stderr) of `python -m experiments.train`, with a folder to write to."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 400)
    return partial(run, capfd, "train", "--data", tmp_path / "text.txt", "--out", tmp_path / "run", *SMALL)


def test_train_over_budget_is_refused_before_anything_is_traced(train, monkeypatch, log, tmp_path):
    monkeypatch.setattr(experiments.train, "print_resolved", lambda *_: pytest.fail("got as far as running"))
    guard = ["--mesh", "dp=2", "--price-per-hour", "0.35", "--spend-log", log.path]
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
    assert log.spent() == 0 and not (tmp_path / "run").exists()


@pytest.mark.parametrize("stop", ["time", pytest.param("SIGTERM", marks=pytest.mark.exhaustive)])
def test_train_stops_between_steps_saves_and_settles(train, log, tmp_path, stop):
    """When three steps are finished and the fourth has begun, the clock stands at two hours and 59 minutes, or a signal
    comes."""
    metrics, sent = tmp_path / "run" / "metrics.jsonl", []

    def now() -> float:
        late = metrics.exists() and len(metrics.read_text().splitlines()) >= 3
        if late and stop == "SIGTERM" and not sent:  # a second one would end it at once
            sent.append(True)
            os.kill(os.getpid(), signal.SIGTERM)
        return 10740.0 if late else 0.0

    guard = ["--mesh", "dp=2", "--price-per-hour", "0.35", "--max-hours", "3", "--spend-log", log.path]
    code, out, _ = train(*guard, "--steps", "50", now=now)
    assert code == (EXIT_BUDGET if stop == "time" else 128 + signal.SIGTERM)
    assert "stopped after 4 of 50 steps" in out and "the newest checkpoint is of step 4" in out
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000004"]
    assert len(metrics.read_text().splitlines()) == 4
    stopped = json.loads((tmp_path / "run" / "stopped.json").read_text())
    assert stopped["steps"] == 4 and stopped["of"] == 50 and stopped["reason"]
    assert not (tmp_path / "run" / "summary.json").exists()
    assert log.spent() == Decimal("2.088334")


def test_train_within_its_budget_finishes_and_settles(train, log, tmp_path):
    guard = ["--price-per-hour", "0.35", "--max-hours", "3", "--spend-log", log.path]
    code, out, _ = train(*guard, "--steps", "2", now=lambda: 0.0)
    assert code == 0 and "done" in out and "cost $0.00 of $1.05 reserved" in out
    (job,) = log.read().jobs.values()
    assert job.actual == 0 and (tmp_path / "run" / "summary.json").exists()
