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
from support import programs
from support.launched import LAUNCHER_VARIABLES, ROOT, as_processes

from experiments import launch
from experiments.warden import Guarded
from jaxdist.errors import ConfigError
from jaxdist.runtime import devices as runtime
from jaxdist.runtime import processes
from jaxdist.runtime.signals import Signals
from jaxdist.runtime.watchdog import EXIT_STUCK

SMALL = (
    "--num-layers 1 --width 16 --num-heads 2 --seq-len 16 --batch-size 8 --dropout 0.1 --steps 6 --checkpoint-every 2 "
    "--eval-every 50 --eval-windows 8 --grace 200 --data OUT/text.txt"
)

# Trains, and writes down which rows of training batches this process read.
TRAIN_COUNTING_ROWS = """
import json, sys
import jax
import experiments.train as train
from experiments.entry import run_program
from jaxdist.data.batches import Batches

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
        [sys.executable] * (command[0] in ("-m", "-c")) + [word.replace("OUT", str(folder)) for word in command],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=bound,
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 400)
    return folder


@pytest.fixture
def train_here(capfd, folder):
    """(exit code, stdout, stderr) of `python -m experiments.train` in this process."""

    def train(flags: str) -> tuple[int, str, str]:
        return programs.run(capfd, "train", *f"{SMALL} {flags}".replace("OUT", str(folder)).split())

    return train


def losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


# ---- two processes are one run ----


@pytest.fixture(scope="module")
def stopped_early(folder) -> Path:
    """Two processes with two devices each, until one of them gets SIGTERM before step 3."""
    train = ["-c", TRAIN_COUNTING_ROWS, *SMALL.split(), *["--mesh", "dp=2,tp=2", "--zero", "1", "--out", "OUT/two"]]
    code, text = run([*as_processes(2, 2), *train, "--drill", "term:step=3,process=1"], folder)
    assert code == 143, text
    assert "process 1: SIGTERM; the newest checkpoint is of step" in text
    assert "[0] mesh" in text and "[1] mesh" not in text  # the first one speaks
    return folder / "two"


def test_two_processes_have_the_losses_of_one_and_one_process_continues_their_run(stopped_early, train_here, folder):
    before = losses(stopped_early)
    assert len(before) in (4, 5)
    assert train_here("--mesh dp=2,tp=2 --zero 1 --out OUT/one")[0] == 0
    whole = losses(folder / "one")
    # The gradient norm is a sum over all four ranks, which gloo and the threads of one process add in another order.
    np.testing.assert_allclose(before, whole[: len(before)], rtol=1e-6)

    code, out, _ = train_here("--mesh dp=2,tp=2 --zero 1 --out OUT/two")
    assert code == 0 and f"resumed after step {len(before)}" in out
    np.testing.assert_allclose(losses(stopped_early), whole, rtol=1e-5)


def test_each_process_reads_its_own_rows_and_no_other(stopped_early, folder):
    mine = [json.loads((folder / f"two.rows.{index}").read_text()) for index in range(2)]
    assert mine == [[0, 1, 2, 3], [4, 5, 6, 7]]  # dp is split over the processes, tp is not


def test_generate_and_evaluate_as_two_processes(stopped_early, folder):
    said = []
    (folder / "prompts.txt").write_text("the quick\njumps\n")
    for launcher in ([], as_processes(2, 2)):
        words = ["-m", "experiments.evaluate", "OUT/two", *["--mesh", "dp=2,tp=2", "--data", "OUT/text.txt"]]
        code, text = run([*launcher, *words, "--windows", "8", "--batch-size", "2"], folder)
        assert code == 0 and text.count("perplexity") == 1, text
        evaluated = float(text.partition("perplexity ")[2].partition(":")[0].replace(",", ""))
        words = ["-m", "experiments.generate", "OUT/two", *["--mesh", "dp=2,tp=2", "--max-new-tokens", "4"]]
        code, text = run([*launcher, *words, "--prompts", "OUT/prompts.txt", "--temperature", "1"], folder)
        assert code == 0 and text.count("2 prompts of") == 1, text
        lines = [line.removeprefix("[0] ") for line in text.splitlines()]
        said.append((evaluated, [line for line in lines if line.startswith(("the quick", "jumps"))]))
    (one, texts), (two, texts_of_two) = said
    assert two == pytest.approx(one, rel=1e-5) and texts == texts_of_two and len(texts) == 2


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


def test_a_process_that_has_left_the_others_listens_no_more(monkeypatch):
    """JAX's own exit handler runs while the listener still waits; a whole run must not fail by it."""
    monkeypatch.setattr(processes, "LISTEN_SECONDS", 0.0)
    monkeypatch.setattr(processes, "coordination_client", lambda: None)
    processes._listen()


def test_what_one_process_finds_wrong_ends_the_others(folder):
    alone = """
import time
from jaxdist.runtime import processes
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
from jaxdist.runtime import processes
from jaxdist.runtime.watchdog import Watchdog
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
    monkeypatch.setattr(processes, "take_number", lambda *_: None)  # other tests of this machine hold it too
    monkeypatch.setattr(processes, "_number", [])
    processes.join("10.0.0.1:1234" if named_by == "flag" else None, *given)
    assert calls == [("10.0.0.1:1234", *joined)]


@pytest.mark.skipif(sys.platform != "linux", reason="holds numbers by a Linux socket without a file")
def test_a_late_process_of_a_number_that_is_taken_never_reaches_the_others(monkeypatch):
    """JAX's service would end the one that runs, and with it all others."""
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: pytest.fail("it registered"))
    monkeypatch.setattr(processes, "_number", [])
    port = launch.free_port()
    with (
        processes.take_number(f"127.0.0.1:{port}", 1),
        processes.take_number(f"127.0.0.1:{port}", 0),
        pytest.raises(ConfigError, match="process 1"),
    ):
        processes.join(f"localhost:{port}", 2, 1)
    processes.take_number(f"127.0.0.1:{port}", 1).close()  # free again


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


# ---- processes that were not given the same ----


@pytest.mark.parametrize("kind", ["lr", "data", "folder", "model", "config"])
def test_processes_that_disagree_end_at_once_and_nothing_is_saved(folder, kind):
    """One argument of the command is each process's own: ITS in it is the number of the process."""
    (folder / "text.0").write_text("some text of the first process " * 300)
    (folder / "text.1").write_text("some other text of the second one " * 300)
    for name in ("local.0", "local.1"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "its_model.py").write_text(f"from llama import Llama  # {name}")
    (folder / "settings.0.toml").write_text("[parallel]\nzero = 1")
    flags, said = {
        "lr": ("--lr 1e-ITS3 --out OUT/differ", "--lr is 1e-03 on process 0 and 1e-13 on process 1"),
        "data": ("--data OUT/text.ITS --out OUT/differ", "--data is OUT/text.0, UTF-8 bytes"),
        "folder": ("--out OUT/local.ITS", "process 1 does not see in OUT/local.1 what the others write"),
        "model": ("--model its_model:Llama --out OUT/differ", "the source of its_model:Llama (SHA-256) is"),
        "config": (
            "--config OUT/settings.ITS.toml --out OUT/differ",
            "settings.1.toml': it cannot be read (No such file",
        ),
    }[kind]
    code = (
        "import os, sys; sys.argv = [word.replace('ITS', os.environ['JAX_PROCESS_ID']) for word in sys.argv]\n"
        "sys.path.append(sys.argv.pop())\n"
        "import experiments.train as train; from experiments.entry import run_program\n"
        "run_program(train.TrainFlags, train.main, 'train')"
    )
    words = ["-c", code, *SMALL.split(), "--mesh", "dp=2", *flags.split(), "OUT/local.ITS"]
    code, text = run([*as_processes(2, 1), *words], folder)
    said = said.replace("OUT", str(folder)).replace("1e-03", "0.001")
    assert code == 2 and said in text and "Traceback" not in text, text
    assert "process 1 was killed" not in text and not (folder / "differ").exists()
    assert not list(folder.glob("local.*/checkpoints"))


# ---- what is started does not outlive what started it ----


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_the_children_of_a_launcher_end_with_it(folder, number):
    code = f"import os; print('pid', os.getpid(), flush=True); {SLEEP}"
    command = [sys.executable, "-m", "experiments.launch", "--processes", "2", "--", "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    hears = lambda: signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None  # noqa: E731, under nohup
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=hears) as launcher:
        children = [int(launcher.stdout.readline().split()[-1]) for _ in range(2)]
        launcher.send_signal(number)
        assert launcher.wait(60) == (-9 if number == signal.SIGKILL else 128 + number)
    deadline = time.monotonic() + 60
    while not all(map(gone, children)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--coordinator here", "--coordinator here: "),
        ("--coordinator :1", "--coordinator :1: "),
        ("--coordinator a:99999", "--coordinator a:99999"),
        (
            "--coordinator 127.0.0.1:1 --num-processes 2 --process-id 2",
            "process 2 of 2: processes must",
        ),
        ("--coordinator 127.0.0.1:1 --num-processes 0", "--num-processes 0"),
        ("--num-processes 2", "Add --coordinator"),
        ("--process-id 0", "Add --coordinator"),
        ("--heartbeat 0", "--heartbeat 0"),
    ],
)
def test_wrong_numbers_of_processes_are_refused(train_here, flags, said):
    code, _, err = train_here(f"--out OUT/nothing {flags}")
    assert code == 2 and said in err


def test_ranks_that_do_not_divide_over_processes_are_refused(monkeypatch):
    monkeypatch.setattr(processes, "count", lambda: 2)
    with pytest.raises(ConfigError, match=r"a mesh of 3 devices on 2 processes.*Use a mesh of 2 devices"):
        runtime.acquire_devices(3, "cpu")


# Joins once and compares many command lines: process 1 is given `theirs`, a list of words for each.
COMPARE = """
import json, sys
import jax
import tyro
from rich.console import Console
from experiments.train import TrainFlags
from jaxdist import compat, versions
from jaxdist.runtime import processes

mine, theirs = json.loads(sys.argv[1]), json.loads(sys.argv[2])
TrainFlags().join(Console(quiet=True))
for words in theirs:
    flags = tyro.cli(TrainFlags, args=[*mine, *(words if processes.index() else [])])
    try:
        processes.require_agreement("flags", flags._must_be_equal())
        print("equal")
    except processes.Disagreement as error:
        print(error)
    sys.stdout.flush()
versions.source_digest = lambda: "another"[: 7 * processes.index()]
jax.config.update("jax_enable_x64", bool(processes.index()))
jax.config.update("jax_default_matmul_precision", ["float32", "highest"][processes.index()])
try:
    processes.require_agreement("flags", TrainFlags()._must_be_equal())
except processes.Disagreement as error:
    print(error)
"""


KINDS = {
    "--lr": ["--lr", "1e-4"],
    "--seed": ["--seed", "7"],
    "--steps": ["--steps", "9"],
    "--checkpoint-every": ["--checkpoint-every", "3", "--out", "x"],
    "--zero": ["--zero", "1"],
    "--mesh": ["--mesh", "tp=2"],
    "--dtype": ["--dtype", "bfloat16"],
    "--eval-every": ["--eval-every", "7"],
    "--on-nonfinite": ["--on-nonfinite", "skip"],
    "--out": ["--out", "x"],
    "--batch-size": ["--batch-size", "32"],
    "--max-hours": ["--max-hours", "2"],
    "--sp": ["--sp"],
    "--drill": ["--drill", "nan:step=1"],
    "": ["--data", "/another/path/to/the/same"],  # what it holds is compared, not where it lies
}


def test_what_differs_between_processes_is_named_with_both_values(folder):
    words = ["-c", COMPARE, json.dumps(["--mesh", "dp=2"]), json.dumps(list(KINDS.values()))]
    code, text = run([*as_processes(2, 1), *words], folder)
    assert code == 0, text
    for index in range(2):  # every process knows
        lines = [line.removeprefix(f"[{index}] ") for line in text.splitlines() if line.startswith(f"[{index}] ")]
        *lines, last = [line for line in lines if line == "equal" or "processes of one run" in line]
        for flag, line in zip(KINDS, lines, strict=True):
            assert (f"{flag} is " in line and "on process 0 and" in line and "on process 1" in line) or not flag, line
        assert lines[-1] == "equal"
        for name in ("the source of jaxdist", "jax_enable_x64", "jax_default_matmul_precision"):
            assert name in last
