"""A run that is stopped, killed, damaged or sent back goes on by the same command, and says what it did."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from support.programs import run

import experiments.train
from experiments.listeners import Listener
from experiments.train import MAX_SKIPS_IN_A_ROW, Loop, Stopped, is_fault
from jaxdist.checkpoint.resume import Progress, Start
from jaxdist.errors import ConfigError
from jaxdist.runtime import run_folder
from jaxdist.runtime.metrics import StepLines
from jaxdist.runtime.run_folder import LOCK, held

ROOT = Path(__file__).resolve().parents[2]

BOUND = 1.75  # times the mean, of the busiest expert in the end (docs/experts.md)
SMALL = (
    "--num-layers 1 --width 16 --num-heads 2 --seq-len 16 --batch-size 8 --dropout 0.1 --eval-every 4 --eval-windows 8"
)


@pytest.fixture
def train(capfd, tmp_path):
    """(exit code, stdout, stderr) of `python -m experiments.train` in this process; the text to train on is made."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 400)

    def train(flags: str, small: str = SMALL) -> tuple[int, str, str]:
        words = ["--data", tmp_path / "text.txt", *small.split(), *flags.replace("OUT", str(tmp_path)).split()]
        return run(capfd, "train", *words)

    return train


def metrics(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder) -> list[float]:
    return [record["loss"] for record in metrics(folder)]


def test_the_same_command_continues_bit_for_bit_then_has_nothing_to_do(train, tmp_path):
    flags = "--mesh dp=2 --zero 1 --steps 8 --checkpoint-every 2 --keep-last 2"
    assert train(f"{flags} --out OUT/whole")[0] == 0

    code, out, _ = train(f"{flags} --out OUT/cut --drill term:step=5")
    assert code == 128 + 15
    assert "stopped after 5 of 8 steps: SIGTERM; the newest checkpoint is of step 5" in out
    assert (tmp_path / "cut" / "stopped.json").exists()
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss": 0.0}\n{"step": 7, "lo')  # of steps after the checkpoint, the last line cut
    code, out, _ = train(f"{flags} --out OUT/cut")
    assert code == 0 and "resumed after step 5" in out and "written on dp=2" in out

    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    batches = [[record["batch"] for record in metrics(tmp_path / name)] for name in ("cut", "whole")]
    assert batches[0] == batches[1] == list(range(8))
    read = lambda name: json.loads((tmp_path / name / "summary.json").read_text())  # noqa: E731
    assert read("cut") == read("whole") and read("cut")["tokens"] == 8 * 8 * 16
    manifests = [tmp_path / name / "checkpoints" / "step_00000008" / "manifest.json" for name in ("cut", "whole")]
    progress = [json.loads(path.read_text())["about"]["progress"] for path in manifests]
    assert progress[0] == progress[1]
    assert not (tmp_path / "cut" / "stopped.json").exists()
    assert sorted(path.name for path in (tmp_path / "cut" / "checkpoints").iterdir()) == [
        "step_00000006",
        "step_00000008",
    ]

    before = (tmp_path / "cut" / "metrics.jsonl").read_text()
    code, out, _ = train(f"{flags} --out OUT/cut")
    assert code == 0 and "complete: nothing is left to do" in out
    code, _, err = train(f"{flags} --out OUT/cut --lr 0.1")
    assert code == 2 and "optimizer.lr is 0.003 there and 0.1 here" in err
    (tmp_path / "other.txt").write_text("another text of the same run, it is said; " * 400)
    code, _, err = train(f"{flags} --out OUT/cut --data OUT/other.txt")
    assert code == 2 and "must hold a run on the same data: its run reads" in err
    code, _, err = train(f"{flags} --out OUT/cut --fresh")
    assert code == 2 and "--fresh with --out" in err and "--overwrite" in err
    assert (tmp_path / "cut" / "metrics.jsonl").read_text() == before

    # Another mesh, another strategy, other settings: a run of its own from that checkpoint.
    code, _, err = train(f"{flags} --out OUT/more --restore OUT/cut")
    assert code == 2 and "--steps 8" in err
    code, _, err = train(f"{flags} --out OUT/more --restore OUT/cut:7 --steps 10")
    assert code == 2 and "it holds those of steps 6, 8" in err
    code, _, err = train(f"{flags} --out OUT/more --restore OUT/cut --steps 10 --width 32")
    assert code == 2 and "model.width is 16 there and 32 here" in err
    code, out, _ = train("--mesh tp=2 --dtype bfloat16 --lr 0.001 --out OUT/more --restore OUT/cut:6 --steps 8")
    assert code == 0 and "restored from step 6" in out
    assert [record["step"] for record in metrics(tmp_path / "more")] == [7, 8]
    assert [record["batch"] for record in metrics(tmp_path / "more")] == [6, 7]


def test_a_held_out_loss_that_is_nan_ends_the_run(train, tmp_path):
    code, out, _ = train("--steps 1 --lr 1e20 --out OUT/run")
    assert code == 1 and "the held-out loss after step 1 is nan" in out and "no checkpoint was made" in out
    assert not (tmp_path / "run" / "summary.json").exists()


def test_fresh_removes_the_run_behind_a_link_and_nothing_of_others(train, tmp_path):
    run, scratch = tmp_path / "run", tmp_path / "scratch"
    scratch.mkdir()
    run.mkdir()
    (scratch / "mine.txt").write_text("mine")
    (run / "checkpoints").symlink_to(scratch)
    assert train("--steps 2 --out OUT/run")[0] == 0
    (run / "processes" / "0001.jsonl").write_text("of a second process\n")
    (run / "tokenizer.json").write_text("of the run before")
    code, out, _ = train("--steps 2 --out OUT/run --fresh --overwrite")
    assert code == 0 and "resumed" not in out and [record["step"] for record in metrics(run)] == [1, 2]
    assert sorted(path.name for path in scratch.iterdir()) == ["mine.txt", "step_00000002"]
    assert [path.name for path in (run / "processes").iterdir()] == ["0000.jsonl"]
    assert not (run / "tokenizer.json").exists()


def test_a_run_is_removed_when_nothing_is_left_to_refuse(train, tmp_path):
    """It may be what the new one was to begin from."""
    run = tmp_path / "2026-11-28T15:04:22"  # whose end is no step
    assert train("--steps 2 --out OUT/2026-11-28T15:04:22")[0] == 0
    again = "--steps 4 --out OUT/2026-11-28T15:04:22 --fresh --overwrite"
    for begun, said in (("OUT/2026-11-28T15:04:22", "must lie outside"), ("OUT/nowhere", "holds no committed one")):
        code, _, err = train(f"{again} --restore {begun}")
        assert code == 2 and said in err and (run / "checkpoints/step_00000002").is_dir()
    assert train("--steps 4 --out OUT/next --restore OUT/2026-11-28T15:04:22")[0] == 0


def test_what_does_nothing_in_a_run_that_goes_on_is_said(train):
    assert train("--steps 4 --out OUT/run --checkpoint-every 2 --drill term:step=3")[0] == 143
    code, out, err = train("--steps 4 --out OUT/run --checkpoint-every 2 --profile 2:3 --eval-windows 1")
    assert code == 0 and "--profile does nothing: its step 2 was done before" in " ".join(out.split())
    assert "up to step 3 are of 8 windows, and from there on of 1" in " ".join((out + err).split())


def test_a_run_takes_along_what_its_weights_came_with(train, tmp_path):
    assert train("--steps 1 --out OUT/other")[0] == 0
    (tmp_path / "other" / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert train("--steps 2 --out OUT/run --restore OUT/other")[0] == 0
    assert (tmp_path / "run" / "generation_config.json").read_text() == '{"eos_token_id": 7}'


def test_a_folder_that_a_run_would_damage_or_read_is_refused(train, tmp_path, capfd):
    """Weights, whose config.json the run's would replace; a folder in the data, of which the run would be a part."""
    (tmp_path / "hf").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "hf" / name).write_text("theirs")
    code, _, err = train("--steps 1 --out OUT/hf")
    assert code == 2 and "must not hold weights" in " ".join(err.split())
    assert (tmp_path / "hf" / "config.json").read_text() == "theirs"
    words = ["--data", tmp_path, *SMALL.split(), "--steps", "1", "--out", tmp_path / "run"]
    code, _, err = run(capfd, "train", *words)
    assert code == 2 and "must be outside of" in " ".join(err.split()) and not (tmp_path / "run").exists()


def test_a_damaged_newest_checkpoint_is_refused_or_passed_over(train, tmp_path):
    flags = "--steps 6 --checkpoint-every 2 --out OUT/run"
    assert train(f"{flags} --drill term:step=5")[0] == 143
    for path in sorted((tmp_path / "run" / "checkpoints" / "step_00000005").rglob("*")):
        if path.is_file() and path.name != "manifest.json" and path.stat().st_size:
            path.write_bytes(path.read_bytes()[:-1])
            break
    code, _, err = train(flags)
    assert code == 2 and path.name in err and "--fall-back" in err
    code, out, _ = train(f"{flags} --fall-back")
    assert code == 0 and path.name in " ".join(out.split()) and "resumed after step 4" in out
    assert [record["step"] for record in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("policy", ["stop", "skip", "roll-back"])
def test_a_gradient_that_is_not_finite(train, tmp_path, policy):
    flags = f"--mesh dp=2 --steps 8 --checkpoint-every 3 --out OUT/run --on-nonfinite {policy}"
    code, out, _ = train(f"{flags} --drill nan:step=5,rank=1,leaf=positions")
    said = "step 5 is not finite (batch 4): rank 1 (dp=1): positions"
    assert said in out
    seen = [(record["step"], record["batch"]) for record in metrics(tmp_path / "run")]
    if policy == "stop":
        assert code == 1 and "the newest checkpoint is of step 3" in out
        assert seen[-1] == (5, 4)
        code, out, _ = train(flags)  # without the fault
        assert code == 0 and "resumed after step 3" in out
        assert [record["step"] for record in metrics(tmp_path / "run")] == list(range(1, 9))
    elif policy == "skip":
        assert code == 0 and f"skipped {said}" in out
        assert seen == [(step, step - 1) for step in range(1, 9)]
        assert metrics(tmp_path / "run")[4]["grad_norm"] is None
    else:  # the drill strikes step 5 again, with another batch, until the run has had enough
        assert code == 1 and out.count("rolled back to step 3") == 5
        assert "rolled back 5 times already; the newest checkpoint is of step 3" in out


class Heard(Listener):
    """What the loop tells of each step, in order."""

    events: list = []  # noqa: RUF012

    def on_dispatched(self, loop, step):
        self.events.append(f"dispatched {step}")

    def on_computed(self, loop, step, record):
        self.events.append(f"computed {step}")


@pytest.fixture
def events(monkeypatch) -> list:
    """What a run's loop does, in order."""
    of_run = experiments.train.listeners_of
    monkeypatch.setattr(experiments.train, "listeners_of", lambda run: [*of_run(run), Heard(run)])
    monkeypatch.setattr(Heard, "events", [])
    return Heard.events


def test_a_step_is_dispatched_before_the_one_before_it_is_looked_at(train, events):
    """But for the first one, and where the state is evaluated, compared or saved."""
    assert train("--mesh dp=2 --steps 8 --eval-every 4 --check-replicas-every 6")[0] == 0
    waited_for, expected = {1, 4, 6, 8}, []
    for step in range(1, 9):
        expected += [f"dispatched {step}"] + [f"computed {step - 1}"] * (step > 1 and step - 1 not in waited_for)
        expected += [f"computed {step}"] * (step in waited_for)
    assert events == expected


def test_an_input_that_fails_takes_no_finished_step_with_it(train, tmp_path, monkeypatch, events):
    make = Loop._make_batch

    def failing(loop, index):
        if index == 3:
            raise ConfigError("the data", "must be there", "Bring it")
        return make(loop, index)

    monkeypatch.setattr(Loop, "_make_batch", failing)
    code, _, err = train("--mesh dp=2 --steps 8 --eval-every 8 --prefetch 1 --out OUT/run")
    assert code == 2, err
    assert events[-2:] == ["computed 2", "computed 3"]
    assert len(metrics(tmp_path / "run")) == 3


@pytest.fixture
def skipping(monkeypatch):
    """A loop of `--on-nonfinite skip` that judges steps and takes none."""
    monkeypatch.setattr(experiments.train, "gather_ranks", lambda *_: None)
    monkeypatch.setattr(experiments.train, "name_culprits", lambda *_: [])
    monkeypatch.setattr(experiments.train.expert_load, "broken", lambda *_: [])
    loop = object.__new__(Loop)
    loop.run = SimpleNamespace(
        flags=SimpleNamespace(on_nonfinite="skip", on_spike="ignore"),
        config=SimpleNamespace(model=SimpleNamespace(kinds=())),
        program=SimpleNamespace(layout=None),
        say=lambda *_: None,
        newest=lambda: "",
    )
    loop.progress, loop._not_finite, loop.counts, loop._skips_in_a_row = Progress(), None, {}, 0
    return loop


BAD = {"step": 1, "batch": 0, "loss": np.nan, "grad_norm": 1.0}
GOOD = {**BAD, "loss": 1.0}


def test_a_run_ends_at_one_more_skipped_step_in_a_row_than_may_be(skipping):
    for _ in range(MAX_SKIPS_IN_A_ROW):
        skipping.require_sound(BAD)
    with pytest.raises(Stopped, match="step 1 is not finite"):
        skipping.require_sound(BAD)
    assert skipping.progress.num_skipped == MAX_SKIPS_IN_A_ROW


def test_a_sound_step_ends_the_row_of_skipped_ones(skipping):
    for _ in range(MAX_SKIPS_IN_A_ROW + 1):
        skipping.require_sound(BAD)
        skipping.require_sound(GOOD)
    assert skipping.progress.num_skipped == MAX_SKIPS_IN_A_ROW + 1


def test_an_overflow_is_a_fault_where_no_lower_loss_scale_is_left():
    overflow = {"loss": 1.0, "grad_norm": np.inf}
    assert is_fault(overflow) and is_fault({**overflow, "loss_scale": 1.0})
    assert not is_fault({**overflow, "loss_scale": 2.0})
    assert is_fault({**BAD, "loss_scale": 2.0}) and not is_fault(GOOD)


def test_a_loss_that_jumps_sends_the_run_back_past_the_batch(train, tmp_path):
    flags = "--steps 40 --lr 0.01 --checkpoint-every 10 --out OUT/run --on-spike roll-back"
    code, out, _ = train(f"{flags} --drill batch:step=34")
    assert code == 0 and "rolled back to step 30: the loss jumped to" in out and "4 batches are left out" in out
    seen = [(record["step"], record["batch"]) for record in metrics(tmp_path / "run")]
    assert seen == [(step, step - 1 + 4 * (step > 30)) for step in range(1, 41)]
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "step_00000040" / "manifest.json").read_text())
    assert manifest["about"]["progress"]["num_skipped"] == 4
    assert np.isfinite(losses(tmp_path / "run")).all()


def test_a_run_that_goes_back_takes_its_lines_and_those_of_its_process_back():
    run = mock.Mock()
    run.start_from.return_value = Start(4, None, Progress(batch=4), "")
    again = experiments.train.go_back(run, Start(0, None, Progress(), ""), experiments.train.RollBack("a spike", 7))
    assert (again.step, again.progress.batch, again.progress.num_skipped) == (4, 7, 3)
    run.files.go_back.assert_called_once_with(4)
    run.lines.go_back.assert_called_once_with(4)


def test_copies_that_differ_are_never_saved(train, tmp_path):
    code, out, _ = train(
        "--mesh dp=3 --batch-size 9 --steps 8 --checkpoint-every 2 --out OUT/run --drill flip:step=4,rank=2"
    )
    assert code == 1
    assert "after step 4 copies differ that should be equal: rank 2 (dp=2): params." in out
    assert "the newest checkpoint is of step 2" in out
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000002"]


def test_a_folder_is_of_one_run_at_a_time(train, tmp_path):
    folder = tmp_path / "run"
    with held(folder, "out", pytest.fail):
        code, _, err = train("--steps 1 --out OUT/run")
        assert code == 2 and f"process {os.getpid()} on" in err and "is using it" in err
    assert not folder.exists()  # nothing was written in it
    assert train("--steps 1 --out OUT/run")[0] == 0
    with held(folder, "out", pytest.fail):  # the lock ended with its run, the file stayed
        assert (folder / "summary.json").exists()


def test_a_killed_holder_leaves_no_lock(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from jaxdist.runtime.run_folder import held\n"
        "with held(Path(sys.argv[1]), 'out', print): os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code, tmp_path / "run"], env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert killed.returncode == -9 and (tmp_path / "run" / LOCK).exists()
    with held(tmp_path / "run", "out", pytest.fail):
        pass


def test_a_lock_on_a_file_that_its_holder_removed_meanwhile_is_taken_again(tmp_path, monkeypatch):
    flock = run_folder.fcntl.flock

    def too_late(*how):
        (tmp_path / LOCK).unlink()
        monkeypatch.setattr(run_folder.fcntl, "flock", flock)
        flock(*how)

    monkeypatch.setattr(run_folder.fcntl, "flock", too_late)
    with (
        held(tmp_path, "out", pytest.fail),
        pytest.raises(ConfigError, match="is using it"),
        held(tmp_path, "out", pytest.fail),
    ):
        pass


@pytest.mark.exhaustive
def test_the_load_of_experts_evens_out_and_a_run_goes_on_with_another_ep(train, tmp_path):
    small = SMALL.replace("--dropout 0.1", "--model moe-proof --num-kv-heads 1 --ffn-width 32 --balance-loss 0.1")
    flags = "--lr 1e-2 --warmup-steps 0 --steps 60 --checkpoint-every 30 --seed 3"
    assert train(f"{flags} --mesh dp=2,ep=2 --out OUT/whole", small)[0] == 0
    assert train(f"{flags} --mesh dp=2,ep=2 --out OUT/cut --drill term:step=30", small)[0] == 128 + 15
    code, _, err = train(f"{flags} --mesh dp=4,ep=4 --zero 3 --out OUT/cut", small)
    assert code == 0, err
    np.testing.assert_allclose(losses(tmp_path / "cut"), losses(tmp_path / "whole"), rtol=1e-4)
    for folder in ("whole", "cut"):
        busiest = [record["expert_load_max"] for record in metrics(tmp_path / folder)]
        assert max(busiest[:5]) > 2 and max(busiest[-10:]) < BOUND, busiest


def test_what_a_run_that_goes_on_does_not_begin_from_is_named(train):
    assert train("--steps 2 --out OUT/other")[0] == 0
    flags = "--steps 4 --out OUT/run --restore OUT/other"
    code, out, _ = train(f"{flags} --drill term:step=3")
    assert code == 143 and "is not read" not in out
    for said in ("resumed after step 3", "nothing is left to do"):
        code, out, _ = train(flags)
        assert code == 0 and said in out and "/other is not read" in out


def test_a_run_that_is_stopped_saves_no_copies_that_differ(train, tmp_path, monkeypatch):
    asked = iter([None] * 4 + [("SIGTERM", 143)])
    monkeypatch.setattr(experiments.train.Run, "stop_reason", lambda run, in_flight: next(asked))
    code, out, _ = train("--mesh dp=3 --batch-size 9 --steps 8 --out OUT/run --drill flip:step=4,rank=2")
    assert code == 1 and "after step 4 copies differ that should be equal: rank 2 (dp=2): params." in out
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--checkpoint-every 5", "there must be a folder for checkpoints"),
        ("--checkpoint-every 0 --out OUT/run", "--checkpoint-every 0"),
        ("--keep-last 0 --out OUT/run", "--keep-last 0"),
        ("--overwrite --out OUT/run", "--overwrite without --fresh"),
        ("--on-spike roll-back --out OUT/run", "roll-back without --checkpoint-every"),
        ("--grace 0", "--grace 0.0"),
        *((f"--out OUT/{sign}", "no checkpoint could be saved") for sign in "*?[#%"),
        ("--stuck-after nan", "--stuck-after nan"),
        ("--restore OUT/nowhere", "it holds no committed one"),
        ("--drill rot:step=1", "--drill rot:step=1"),
        ("--steps 4 --drill nan:step=5", "--drill nan:step=5"),
        ("--steps 4 --drill die:step=3,process=5", "its process must be 0 to 0"),
        ("--steps 4 --drill full:step=4", "must be one that is saved"),
        ("--steps 4 --out OUT/run --checkpoint-every 2 --drill full:step=3", "must be one that is saved"),
        ("--metrics-host 0.0.0.0", "--metrics-host without --metrics-port"),
        ("--coordinator 127.0.0.1:1 --num-processes 2 --process-id 5", "numbered from 0"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_written(train, tmp_path, flags, said):
    code, _, err = train(flags)
    assert code == 2 and said in err
    assert not (tmp_path / "run").exists()


def test_a_damaged_configuration_is_set_aside_where_a_checkpoint_says_what_ran(train, tmp_path):
    flags = "--steps 4 --checkpoint-every 2 --out OUT/run"
    assert train(f"{flags} --drill term:step=3")[0] == 143
    (tmp_path / "run" / "config.json").write_text('{"cut')
    code, out, _ = train(f"{flags} --lr 1e-4")  # another run is refused all the same, by the checkpoint
    assert code == 2
    (tmp_path / "run" / "config.json").write_text('{"cut')
    code, out, _ = train(flags)
    assert code == 0 and "resumed after step 3" in out and "warning: --out" in out and "config.json.damaged1" in out


def test_a_run_that_goes_on_with_other_rounding_says_so(train):
    flags = "--steps 4 --warmup-steps 0 --out OUT/run"
    assert train(f"{flags} --drill term:step=2")[0] == 143
    code, out, _ = train(f"{flags} --drill term:step=3")
    assert code == 143 and "rounded" not in out
    option = "--compiler-options xla_cpu_enable_fast_min_max=true"
    code, out, err = train(f"{flags} --accumulate 2 --loss-chunks 2 --remat block {option}")
    for said in ("accumulate was 1 and is 2", "loss_chunks", "remat was none", "xla_cpu_enable_fast"):
        assert code == 0 and said in out, (said, out, err)


def test_a_full_disk_is_said_once_and_again_when_it_takes_lines(train, monkeypatch):
    write = StepLines.write

    def full(lines, record):
        lines.failure = "No space left on device"
        return record["step"] not in (2, 3) and write(lines, record)

    monkeypatch.setattr(StepLines, "write", full)
    code, out, _ = train("--steps 5 --warmup-steps 0 --out OUT/run")
    assert code == 0 and out.count("No space left") == 2 and "written again from step 4" in out


def test_flags_about_a_folder_need_one(train):
    for flag in ("--keep-last 2", "--keep-every 5", "--fresh", "--fall-back", "--heartbeat 5"):
        code, _, err = train(f"--steps 1 {flag}")
        assert code == 2 and flag.split()[0] in err
