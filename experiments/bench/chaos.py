"""Break runs in every way this package claims to survive, and check what each one leaves.

python -m experiments.bench chaos [--short]

Kills a process at random moments of its saves, again and again, and after each kill starts the same command, on one
strategy after another; then one run of each documented fault. A row says what was done, what had to come of it, and
whether it did. The last column is how long that took.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from rich.console import Console
from rich.markup import escape

from jaxdist.checkpoint.checkpoints import Checkpoints
from jaxdist.commands import command_words, import_root
from jaxdist.errors import require_positive
from jaxdist.runtime.devices import acquire_devices
from jaxdist.runtime.signals import EXIT_SIGNAL
from jaxdist.runtime.watchdog import EXIT_STUCK

from ..entry import EXIT_BAD_INPUT, EXIT_PEER, EXIT_SAVE, chosen, require_writable, write_output
from ..progress import Progress
from ..tables import Rows

SIZES = "--num-layers 1 --width 16 --num-heads 2 --seq-len 16 --batch-size 8 --eval-every 1000 --eval-windows 8"
BOUND = 240.0  # seconds in which a run of these sizes must end on a slow machine, whatever is done to it
HEARTBEAT = 10

# What the killed runs are; the kills are divided over them. --short takes the first ones.
KILLED = {
    "ZeRO-1 dp=2": "--mesh dp=2 --zero 1",
    "fp16 tp=2": "--mesh tp=2 --sp --dtype float16",
    "ZeRO-3 dp=2 bf16": "--mesh dp=2 --zero 3 --dtype bfloat16",
    "ZB-V pp=2": "--mesh pp=2 --schedule zb-v --num-layers 4",
}
# What differs between two equal runs.
CLOCKS = {"step_seconds", "input_seconds", "tokens_per_second", "seconds", "processes"}


KILLS = "kills"


@dataclass(frozen=True)
class ChaosFlags:
    """Break runs in every documented way."""

    short: bool = False
    """Few kills, and one fault of each kind: for CI."""
    kills: int | None = None
    """Kills during saves. Default: 50, or 4 with --short."""
    seed: int = 0
    only: str = ""
    """Faults whose name contains this text."""
    json: str | None = None
    """Write the rows to this file."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: exit code, what it printed."""

    code: int
    text: str


@dataclass(frozen=True)
class Row:
    fault: str
    expected: str
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True)
class Lab:
    """A folder, a text to train on, and the commands."""

    folder: Path

    def train(self, flags: str, *, processes: int = 1) -> list[str]:
        train = [*command_words("train")[1:], "--data", str(self.folder / "text.txt"), *SIZES.split(), *flags.split()]
        if processes == 1:
            return [sys.executable, *train]
        launch = [*command_words("launch"), "--processes", str(processes), "--bound", "90"]
        return [*launch, "--devices-per-process", "1", "--", *train]

    def start(self, command: list[str]) -> subprocess.Popen:
        environment = os.environ | {"PYTHONPATH": str(import_root()), "XLA_FLAGS": "--xla_backend_optimization_level=0"}
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, flags: str, *, processes: int = 1) -> Outcome:
        """A run to its end. Raises: TimeoutError where it hangs."""
        return self.end(self.start(self.train(flags, processes=processes)))

    def end(self, process: subprocess.Popen) -> Outcome:
        """Wait until a run ends. Raises: TimeoutError where it hangs."""
        try:
            text, _ = process.communicate(timeout=BOUND)
        except subprocess.TimeoutExpired as error:
            process.terminate()  # `launch` passes it on, and kills its processes when they take too long
            try:
                text, _ = process.communicate(timeout=BOUND)
            except subprocess.TimeoutExpired:
                process.kill()
                text, _ = process.communicate()
            raise TimeoutError(f"it did not end within {BOUND:g} s: {text[-500:]}") from error
        return Outcome(process.returncode, text)

    def records(self, out: str) -> list[dict]:
        return [json.loads(line) for line in (self.folder / out / "metrics.jsonl").read_text().splitlines()]

    def committed(self, out: str) -> list[int]:
        folder = self.folder / out / "checkpoints"
        return sorted(int(path.name[5:]) for path in folder.glob("step_*") if path.suffix == "")

    def arrays(self, out: str) -> dict[str, bytes]:
        """The newest checkpoint: its arrays by name."""
        checkpoints = Checkpoints(self.folder / out / "checkpoints")
        manifest = checkpoints.check(self.committed(out)[-1])
        here = SingleDeviceSharding(acquire_devices(1, "cpu").devices[0])
        wanted = {
            name: jax.ShapeDtypeStruct(shape, dtype, sharding=here) for name, (dtype, shape) in manifest.arrays.items()
        }
        return {name: np.asarray(x).tobytes() for name, x in checkpoints.restore(manifest, wanted).items()}

    def spoil(self, out: str, how: Callable[[Path], None]) -> Path:
        """Damage the largest file of the newest checkpoint."""
        step = self.folder / out / "checkpoints" / f"step_{self.committed(out)[-1]:08d}"
        victim = max((path for path in (step / "arrays").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)
        how(victim)
        return victim

    def clear(self) -> None:
        """Remove the runs."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)


def main(flags: ChaosFlags, console: Console) -> int:
    kills = flags.kills if flags.kills is not None else 4 if flags.short else 50
    require_positive("kills", kills, 10**4)
    require_writable("--json", flags.json)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs, and by all they start
    names = chosen(flags.only, [KILLS, *(fault.__name__ for fault in FAULTS)])
    faults = [fault for fault in FAULTS if fault.__name__ in names]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(folder))
        (lab.folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 400)
        if KILLS in names:
            rng = random.Random(flags.seed)
            for name, share in divided(kills).items():
                rows += kill_saves(lab, name, share, rng, console)
                lab.clear()
        for fault in faults:
            with console.status(fault.__doc__):
                rows.append(tried(fault.__doc__, partial(fault, lab)))
            console.print(line(rows[-1]), soft_wrap=True)
            lab.clear()
    table = Rows("fault", "what must come of it", "did it", "seconds")
    for row in rows:
        table.add_row(row.fault, row.expected, "as documented" if row.ok else "NOT", f"{row.seconds:.0f}")
    expected = ("what must come of it",)
    table.print(console, left=expected, under=expected, styles={"as documented": "green", "NOT": "bold red"})
    good = sum(row.ok for row in rows)
    console.print(f"{good} of {len(rows)} ended as documented")
    if flags.json:
        write_output("--json", flags.json, json.dumps([row.__dict__ for row in rows], indent=1) + "\n")
    return 0 if good == len(rows) else 1


def line(row: Row) -> str:
    verdict = "[green]as documented[/]" if row.ok else "[bold red]NOT as documented[/]"
    return f"{verdict}  {row.fault} ({row.seconds:.0f} s)" + "".join(f"\n    {escape(text)}" for text in row.problems)


def tried(name: str, fault: Callable[["Expect"], str]) -> Row:
    expect, begun = Expect(), time.monotonic()
    try:
        expected = fault(expect)
    except (TimeoutError, OSError, ValueError, IndexError) as error:
        expected = ""
        expect.problems.append(f"{type(error).__name__}: {error}")
    return Row(name, expected, expect.problems, time.monotonic() - begun)


class Expect:
    """Collects what was not as it had to be."""

    def __init__(self):
        self.problems: list[str] = []

    def that(self, true: bool, otherwise: str) -> None:
        if not true:
            self.problems.append(otherwise)

    def ended(self, outcome: Outcome, code: int, *said: str) -> None:
        self.that(outcome.code == code, f"exit code {outcome.code} for {code}; the end: {outcome.text[-600:]}")
        flat = " ".join(outcome.text.split())
        for text in said:
            self.that(text in flat, f"{text!r} was not said; the end: {outcome.text[-600:]}")


# ---- kills ----


def divided(kills: int) -> dict[str, int]:
    """Kills for each strategy, at least two, so that a continued run is killed too; fewer strategies for few kills."""
    names = list(KILLED)[: max(1, kills // 2)]
    return {name: len(range(place, kills, len(names))) for place, name in enumerate(names)}


def counted(what: str, times: int) -> Iterator[int]:
    """range(times), with how far it is."""
    with Progress(what) as progress:
        for number in range(times):
            progress.update(number, times)
            yield number


def kill_saves(lab: Lab, name: str, kills: int, rng: random.Random, console: Console) -> list[Row]:
    """kill -9 at random moments of saves; then the run ends as if nothing had been.

    The run saves after every step, so that it is nearly always saving. Each kill comes a random time after a save has
    begun to write, or, where none is under way then, as the next one begins. Between kills the same command continues,
    and must come back with no step less than was committed.
    """
    problems, begun = [], time.monotonic()
    flags = f"{KILLED[name]} --dropout 0.1 --steps 100000 --checkpoint-every 1 --out killed"
    checkpoints, committed, num_halves = lab.folder / "killed" / "checkpoints", 0, 0
    for number in counted(f"kill -9 during a save, {name}", kills):
        process, deadline = lab.start(lab.train(flags)), time.monotonic() + BOUND
        # Some kills strike a save soon after the start, others a later one.
        wanted = committed + rng.randint(1, 4)
        for soonest, pause in ((wanted, rng.random() * 0.25), (0, 0.0)):
            while process.poll() is None and time.monotonic() < deadline:
                if max(lab.committed("killed"), default=0) >= soonest and any(checkpoints.glob("*.partial")):
                    break
                time.sleep(0.002)
            time.sleep(pause)
        if process.poll() is not None:
            problems.append(f"kill {number}: the run ended by itself: {process.communicate()[0][-800:]}")
            break
        os.killpg(process.pid, signal.SIGKILL)
        text = process.communicate()[0]
        after = lab.committed("killed")
        if committed and f"resumed after step {committed} " not in " ".join(text.split()):
            problems.append(f"kill {number}: it did not resume after step {committed}: {text[-800:]}")
        if not after or after[-1] < committed:
            problems.append(f"kill {number}: step {committed} was committed, and now {after}")
        committed = after[-1] if after else 0
        num_halves += any(checkpoints.glob("*.partial"))
    fault = f"kill -9 during a save, {kills} times, {name}"
    row = Row(fault, "resumes after the last committed step", problems, time.monotonic() - begun)
    console.print(f"{line(row)}: {committed} steps committed, {num_halves} kills left half a save", soft_wrap=True)
    steps = committed + 2
    same = tried(f"its {steps} steps, {name}", partial(compare_with_whole, lab, flags, committed, steps))
    console.print(line(same), soft_wrap=True)
    return [row, same]


def compare_with_whole(lab: Lab, flags: str, committed: int, steps: int, expect: Expect) -> str:
    """The run that was killed so often, continued to `steps`, against one that never was: bit for bit."""
    end = f"--drill term:step={steps}"
    expect.ended(lab.run(f"{flags} {end}"), EXIT_SIGNAL + signal.SIGTERM, f"resumed after step {committed} ")
    whole = flags.replace("--checkpoint-every 1 --out killed", "--out whole")
    expect.ended(lab.run(f"{whole} {end}"), EXIT_SIGNAL + signal.SIGTERM)
    one, other = (
        [{key: value for key, value in record.items() if key not in CLOCKS} for record in lab.records(out)]
        for out in ("killed", "whole")
    )
    expect.that(len(one) == steps and one == other, "its metrics differ from those of a run that was not killed")
    expect.that(not list((lab.folder / "killed").rglob("*.partial")), "what kills left of saves was not removed")
    one, other = lab.arrays("killed"), lab.arrays("whole")
    different = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    expect.that(not different, f"its state differs from that of a run that was not killed: {different}")
    return "every loss and the last state of a run never killed"


# ---- faults; the docstring is the name, the returned text what must come of it ----


def sigterm(lab: Lab, expect: Expect) -> str:
    """SIGTERM"""
    flags = "--mesh dp=2 --steps 6 --checkpoint-every 50 --out run"
    expect.ended(lab.run(f"{flags} --drill term:step=4"), 143, "the newest checkpoint is of step 4", "same command")
    expect.ended(lab.run(flags), 0, "resumed after step 4", "done: 6 steps")
    return "finishes its step, saves, exit code 143; the same command continues"


def interrupt(lab: Lab, expect: Expect) -> str:
    """Ctrl-C (SIGINT) while it trains"""
    flags = "--steps 100000 --out run"
    process = lab.start(lab.train(flags))
    metrics, deadline = lab.folder / "run" / "metrics.jsonl", time.monotonic() + BOUND
    while time.monotonic() < deadline and not (metrics.exists() and metrics.stat().st_size > 300):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    expect.ended(lab.end(process), 130, "SIGINT; the newest checkpoint is of step")
    return "finishes its step, saves, exit code 130"


def grace(lab: Lab, expect: Expect) -> str:
    """SIGTERM where a step takes longer than the grace"""
    out = lab.run("--steps 6 --checkpoint-every 1 --out run --grace 2 --drill late:step=4")
    expect.ended(out, 143, "not done within --grace 2 s: the newest checkpoint is of step 3")
    return "exit code 143 when the grace is over, naming the last committed step"


def truncated(lab: Lab, expect: Expect) -> str:
    """the newest checkpoint cut short"""
    return damaged(lab, expect, lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes and")


def flipped(lab: Lab, expect: Expect) -> str:
    """one byte of the newest checkpoint flipped"""

    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0x10
        path.write_bytes(content)

    return damaged(lab, expect, flip, "SHA-256")


def deleted(lab: Lab, expect: Expect) -> str:
    """a file of the newest checkpoint deleted"""
    return damaged(lab, expect, Path.unlink, "the file is missing")


def foreign(lab: Lab, expect: Expect) -> str:
    """a foreign file in the newest checkpoint"""
    return damaged(lab, expect, lambda path: (path.parent / "payload.pkl").write_bytes(b"\x80\x04."), "does not list")


def damaged(lab: Lab, expect: Expect, how: Callable[[Path], None], said: str) -> str:
    flags = "--steps 6 --checkpoint-every 2 --out run"
    expect.ended(lab.run(f"{flags} --drill term:step=5"), 143)
    victim = lab.spoil("run", how)
    name = "payload.pkl" if said == "does not list" else victim.name
    expect.ended(lab.run(flags), EXIT_BAD_INPUT, name, said, "--fall-back")
    expect.ended(lab.run(f"{flags} --fall-back"), 0, "passed over:", "resumed after step 4", "done: 6 steps")
    return "refused, the file named; with --fall-back continues from the newest good one"


def other_model(lab: Lab, expect: Expect) -> str:
    """the checkpoint of another model"""
    expect.ended(lab.run("--steps 2 --out run"), 0)
    expect.ended(lab.run("--steps 4 --width 32 --out new --restore run"), 2, "model.width is 16 there and 32 here")
    expect.ended(lab.run("--steps 4 --vocab-size 300 --out new --restore run"), 2, "model.vocab_size is 256 there")
    expect.that(not (lab.folder / "new" / "metrics.jsonl").exists(), "something was written")
    return "refused, the difference named, before anything is changed"


def disk_full(lab: Lab, expect: Expect) -> str:
    """no room on the disk for a checkpoint"""
    flags = "--steps 6 --checkpoint-every 2 --out run"
    expect.ended(lab.run(f"{flags} --drill full:step=4"), 0, "not saved: the checkpoint of step 4 could not be written")
    expect.that(lab.committed("run") == [2, 6], f"committed: {lab.committed('run')} for [2, 6]")
    expect.ended(
        lab.run(f"{flags.replace('run', 'last')} --drill full:step=6"),
        EXIT_SAVE,
        "could not be written",
        "checkpoint is of step 4",
    )
    return "said, training goes on; exit code 74 where it was the last checkpoint"


def not_finite(lab: Lab, expect: Expect) -> str:
    """NaN in one gradient of one rank"""
    flags = "--mesh dp=2 --steps 6 --checkpoint-every 2 --drill nan:step=4,rank=1,leaf=positions"
    said = "step 4 is not finite (batch 3): rank 1 (dp=1): positions"
    expect.ended(lab.run(f"{flags} --out a"), 1, said, "the newest checkpoint is of step 2")
    expect.ended(lab.run(f"{flags} --out b --on-nonfinite skip"), 0, f"skipped {said}", "done: 6 steps")
    return "step, rank and leaf named; stops, or skips the batch on all ranks"


def spike(lab: Lab, expect: Expect) -> str:
    """a batch of noise"""
    flags = "--lr 0.01 --steps 40 --checkpoint-every 10 --out run --on-spike roll-back --drill batch:step=34"
    expect.ended(lab.run(flags), 0, "rolled back to step 30: the loss jumped", "4 batches are left out", "done: 40")
    return "back to the newest checkpoint, and past the batch"


def diverged_copy(lab: Lab, expect: Expect) -> str:
    """one bit of one copy of a parameter flipped"""
    out = lab.run("--mesh dp=3 --batch-size 9 --steps 6 --checkpoint-every 2 --out run --drill flip:step=4,rank=2")
    expect.ended(out, 1, "copies differ that should be equal: rank 2 (dp=2)", "the newest checkpoint is of step 2")
    return "the rank named before the next checkpoint, which is not made"


def peer_dies(lab: Lab, expect: Expect) -> str:
    """one of two processes killed"""
    flags = f"--mesh dp=2 --steps 8 --checkpoint-every 2 --out run --heartbeat {HEARTBEAT}"
    out = lab.run(f"{flags} --drill die:step=6,process=1", processes=2)
    expect.that(out.code not in (0, None), "exit code 0")
    gone = "another process is gone" in out.text or "heartbeat" in out.text or "unhealthy" in out.text
    expect.that(gone, f"nobody said so: {out.text[-800:]}")
    expect.ended(lab.run(flags, processes=2), 0, "resumed after step", "done: 8 steps")  # 2 or 4
    return f"the other ends within its heartbeat, exit code {EXIT_PEER} or JAX's own; the same command continues"


def stuck(lab: Lab, expect: Expect) -> str:
    """one of two processes stuck"""
    flags = "--mesh dp=2 --steps 6 --checkpoint-every 2 --out run --stuck-after 15"
    out = lab.run(f"{flags} --drill stuck:step=4,process=1", processes=2)
    expect.ended(
        out, EXIT_STUCK, "process 0 is stuck", "process 1 is stuck", "fault_injection.py", "while taking step 4"
    )
    stacks = sorted(path.name for path in (lab.folder / "run").glob("stacks.*"))
    expect.that(stacks == ["stacks.0.txt", "stacks.1.txt"], f"stacks were left in {stacks}")
    return "both write every stack down, exit code 70"


def slow(lab: Lab, expect: Expect) -> str:
    """one of two processes slow"""
    out = lab.run("--mesh dp=2 --steps 24 --out run --drill slow:step=1,process=1", processes=2)
    expect.ended(out, 0, "slow: step 20: process 1 spends", "done: 24 steps")
    return "named"


def term_one(lab: Lab, expect: Expect) -> str:
    """SIGTERM to one of two processes"""
    flags = "--mesh dp=2 --steps 8 --out run"
    out = lab.run(f"{flags} --drill term:step=4,process=1", processes=2)
    expect.ended(out, 143, "process 1: SIGTERM; the newest checkpoint is of step", "same command")
    expect.ended(lab.run(flags), 0, "resumed after step", "done: 8 steps")
    return "all agree on the step to stop before, and save; continues on one process"


FAULTS = (
    sigterm,
    interrupt,
    grace,
    truncated,
    flipped,
    deleted,
    foreign,
    other_model,
    disk_full,
    not_finite,
    spike,
    diverged_copy,
    peer_dies,
    stuck,
    slow,
    term_one,
)
