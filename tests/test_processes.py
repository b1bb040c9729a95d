"""Several processes are one run: the same losses, the same checkpoints, each process with its own rows."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import jax
import numpy as np
import pytest

import experiments.train
from experiments import launch
from experiments.cli import run_program
from experiments.warden import Guarded
from jaxdist import processes, runtime
from jaxdist.errors import ConfigError
from jaxdist.signals import Signals
from jaxdist.watch import EXIT_STUCK

ROOT = Path(__file__).resolve().parent.parent
SMALL = (
    "--num-layers 1 --width 16 --num-heads 2 --seq-len 16 --batch-size 8 --dropout 0.1 --steps 6 --checkpoint-every 2 "
    "--eval-every 50 --eval-batches 1 --grace 200 --data OUT/text.txt"
)
LAUNCHER_VARIABLES = {name for pair in processes.LAUNCHERS for name in pair} | {processes.ADDRESS}

# Trains, and writes down which rows of training batches this process read.
TRAIN_COUNTING_ROWS = """
import json, sys
import jax
import experiments.train as train
from experiments.cli import run_program
from experiments.warden import Guarded
from jaxdist.data import Batches

seen, read = set(), Batches._read
def counted(self, samples):
    seen.update((samples % self.batch_size).tolist())
    return read(self, samples)
Batches._read = counted
try:
    run_program(train.TrainFlags, train.main, "train")
finally:
    with open(f"{sys.argv[sys.argv.index('--out') + 1]}.rows.{jax.process_index()}", "w") as file:
        json.dump(sorted(seen), file)
"""


def run(command: list[str], folder: Path, bound: float = 240) -> tuple[int, str]:
    """(exit code, what it printed) of `python COMMAND`; OUT is the test's folder."""
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environment |= {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    environment["TTY_COMPATIBLE"] = "0"  # mpirun gives a terminal
    done = subprocess.run(
        [word.replace("OUT", str(folder)) for word in command],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=bound,
    )
    return done.returncode, done.stdout


def as_processes(num_processes: int, num_devices: int) -> list[str]:
    launcher = [sys.executable, "-m", "experiments.launch", "--processes", str(num_processes)]
    return [*launcher, "--devices-per-process", str(num_devices), "--"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 400)
    return folder


@pytest.fixture
def train_here(monkeypatch, capfd, folder):
    """(exit code, stdout, stderr) of `python -m experiments.train` in this process."""

    def train(flags: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["train", *f"{SMALL} {flags}".replace("OUT", str(folder)).split()])
        with pytest.raises(SystemExit) as stop:
            run_program(experiments.train.TrainFlags, experiments.train.main, "train")
        return stop.value.code or 0, *capfd.readouterr()

    return train


def losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


# ---- two processes are one run ----


@pytest.fixture(scope="module")
def stopped_at_four(folder) -> Path:
    """Two processes with two devices each, until one of them gets SIGTERM before step 4."""
    train = ["-c", TRAIN_COUNTING_ROWS, *SMALL.split(), *["--mesh", "dp=2,tp=2", "--zero", "1", "--out", "OUT/two"]]
    code, text = run([*as_processes(2, 2), *train, "--drill", "term:step=3,process=1"], folder)
    assert code == 143, text
    assert "process 1: SIGTERM; the newest checkpoint is of step" in text
    assert "[0] mesh" in text and "[1] mesh" not in text  # the first one speaks
    return folder / "two"


def test_two_processes_have_the_losses_of_one_and_one_process_continues_their_run(stopped_at_four, train_here, folder):
    before = losses(stopped_at_four)
    assert len(before) in (3, 4)
    assert train_here("--mesh dp=2,tp=2 --zero 1 --out OUT/one")[0] == 0
    whole = losses(folder / "one")
    # The gradient norm is a sum over all four ranks, which gloo and the threads of one process add in another order.
    np.testing.assert_allclose(before, whole[: len(before)], rtol=1e-6)

    code, out, _ = train_here("--mesh dp=2,tp=2 --zero 1 --out OUT/two")
    assert code == 0 and f"resumed after step {len(before)}" in out
    np.testing.assert_allclose(losses(stopped_at_four), whole, rtol=1e-5)


def test_each_process_reads_its_own_rows_and_no_other(stopped_at_four, folder):
    mine = [json.loads((folder / f"two.rows.{index}").read_text()) for index in range(2)]
    assert mine == [[0, 1, 2, 3], [4, 5, 6, 7]]  # dp is split over the processes, tp is not


def test_verify_as_two_processes(folder):
    flags = "--mesh pp=2,tp=2 --schedule zb-h1 --steps 1 --batch-size 8 --zero 1 --num-layers 2"
    code, text = run([*as_processes(2, 2), "-m", "experiments.verify", *flags.split()], folder)
    assert code == 0 and text.count("1 of 1 strategies compute what one device computes") == 1, text
    assert "SIMULATED devices on the CPUs of 2 processes" in text


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed (Debian: openmpi-bin)")
def test_open_mpi(folder, train_here):
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    train = [sys.executable, "-m", "experiments.train", *SMALL.split(), "--mesh", "dp=2", "--out", "OUT/mpi"]
    code, text = run([*mpirun, *train, "--coordinator", f"127.0.0.1:{launch.free_port()}"], folder)
    assert code == 0 and "the CPUs of 2 processes" in text and text.count("done: 6 steps") == 1, text
    assert train_here("--mesh dp=2 --out OUT/threads")[0] == 0
    assert losses(folder / "mpi") == losses(folder / "threads")  # two ranks, and a + b is b + a


# ---- what cannot work ----


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--coordinator here", "--coordinator here: it is the host of the first process and a port"),
        ("--coordinator :1", "--coordinator :1: it is the host"),
        ("--coordinator a:99999", "--coordinator a:99999"),
        ("--coordinator 127.0.0.1:1 --num-processes 2 --process-id 2", "process 2 of 2: processes are numbered from 0"),
        ("--coordinator 127.0.0.1:1 --num-processes 0", "num_processes=0"),
        ("--num-processes 2", "Add --coordinator"),
        ("--process-id 0", "Add --coordinator"),
        ("--heartbeat 0", "heartbeat=0"),
    ],
)
def test_wrong_numbers_of_processes_are_refused(train_here, flags, said):
    code, _, err = train_here(f"--out OUT/nothing {flags}")
    assert code == 2 and said in err


def test_a_launcher_whose_processes_were_not_asked_to_join_is_refused(train_here, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    code, _, err = train_here("--out OUT/nothing")
    assert code == 2 and "process 1 of 2: nobody asked it to join the others" in err
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "two")
    code, _, err = train_here("--out OUT/nothing")
    assert code == 2 and "OMPI_COMM_WORLD_SIZE=two" in err


def test_ranks_that_do_not_divide_over_processes_are_refused(monkeypatch):
    monkeypatch.setattr(processes, "count", lambda: 2)
    with pytest.raises(ConfigError, match=r"a mesh of 3 devices on 2 processes.*Use a mesh of 2 devices"):
        runtime.acquire_devices(3, "cpu")


def test_what_one_process_finds_wrong_ends_the_others(folder):
    alone = """
import time
from jaxdist import processes
processes.join(None, None, None)
if processes.coordination_index() == 1:
    processes.fail(3, 4, "text.txt cannot be read")
time.sleep(1000)
"""
    code, text = run([*as_processes(2, 1), "-c", alone], folder)
    assert "[0] process 0 ends, since another one did. process 1: text.txt cannot be read" in text
    assert code in (3, 4) and "did not end within" not in text


@pytest.mark.parametrize("later", [0, 1])
def test_the_first_to_notice_that_all_are_stuck_waits_for_the_others(folder, later):
    """JAX aborts a process as soon as the first one is gone: its stacks would be lost."""
    alone = f"""
import time
import jax
from jaxdist import processes
from jaxdist.watch import Watchdog
processes.join(None, None, None)
index = (jax.devices(), jax.process_index())[1]
with Watchdog(4 if index == {later} else 1, f"{folder}/stuck.{later}.{{index}}") as watchdog:
    watchdog.alive("waiting")
    time.sleep(1000)
"""
    code, text = run([*as_processes(2, 1), "-c", alone], folder)
    assert code == EXIT_STUCK
    for index in range(2):
        assert f"process {index} is stuck" in (folder / f"stuck.{later}.{index}").read_text()
        assert f"[{index}] process {index} is stuck" in text


# ---- how a process learns which one it is ----


@pytest.mark.parametrize(
    ("variables", "given", "joined"),
    [
        ({"JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}, (None, None), (4, 3)),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}, (None, None), (4, 2)),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, (None, None), (2, 1)),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_NTASKS": "8"}, (2, 0), (2, 0)),
        # mpirun inside a Slurm job: the inner launcher counts
        (
            {
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_PROCID": "1",
                "OMPI_COMM_WORLD_SIZE": "8",
                "OMPI_COMM_WORLD_RANK": "5",
            },
            (None, None),
            (8, 5),
        ),
        ({}, (2, 1), (2, 1)),
    ],
)
@pytest.mark.parametrize("named_by", ["flag", "variable"])
def test_join_reads_the_variables_of_launchers(monkeypatch, variables, given, joined, named_by):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if named_by == "variable":
        monkeypatch.setenv(processes.ADDRESS, "10.0.0.1:1234")
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **_: calls.append(args))
    processes.join("10.0.0.1:1234" if named_by == "flag" else None, *given)
    assert calls == [("10.0.0.1:1234", *joined)]


# ---- the local starter ----


def started(*codes: str) -> list[Guarded]:
    return [Guarded([sys.executable, "-c", code]) for code in codes]


def ended(children: list[Guarded], bound: float = 30) -> int:
    with nullcontext(Signals()) as signals:
        return launch.wait(children, signals, bound)


SLEEP = "import time; time.sleep(100)"


@pytest.mark.parametrize(
    ("codes", "code", "said"),
    [
        (["", ""], 0, ""),
        (["", "exit(7)"], 7, "process 1 ended with exit code 7"),
        (["import os; os.kill(os.getpid(), 9)", ""], 137, "process 0 was killed by SIGKILL"),
        (["import time; time.sleep(1); exit(3)", "exit(4)"], 4, "process 1 ended with exit code 4; the others have"),
    ],
)
def test_the_exit_code_is_that_of_the_first_process_that_failed(capfd, codes, code, said):
    assert ended(started(*codes)) == code
    assert said in capfd.readouterr().err


def test_the_others_are_killed_after_the_bound(capfd):
    begun, children = time.monotonic(), started(SLEEP, "exit(5)")
    assert ended(children, bound=1) == 5
    assert time.monotonic() - begun < 20 and children[0].returncode == -signal.SIGKILL
    assert "process 0 did not end within 1 s: killed" in capfd.readouterr().err


@pytest.mark.parametrize("deaf", [False, True])
def test_a_signal_is_passed_on_and_those_that_ignore_it_are_killed(deaf):
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " if deaf else ""
    children = started(SLEEP, f"{ignore}{SLEEP}")
    time.sleep(2)
    signals = Signals()
    signals.number = signal.SIGTERM
    assert launch.wait(children, signals, bound=2) == 128 + 15
    assert children[1].returncode == (-9 if deaf else -15)


def test_launch_refuses_nothing_to_start(capfd, monkeypatch):
    for words, said in (([], "there is nothing to start"), (["--processes", "0", "--", "-V"], "processes=0")):
        monkeypatch.setattr(sys, "argv", ["launch", *words])
        with pytest.raises(SystemExit) as stop:
            run_program(launch.LaunchFlags, launch.main, "launch")
        assert stop.value.code == 2 and said in capfd.readouterr().err
