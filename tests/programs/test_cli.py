"""The programs as a user meets them: what they print and write, and how each wrong input ends."""

import dataclasses
import functools
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
from support.programs import run

import experiments.train
from experiments import entry
from experiments.cli import CommonFlags
from experiments.entry import run_program
from experiments.train import TrainFlags
from jaxdist import files, parity
from jaxdist.config import OptimizerConfig, RunConfig
from jaxdist.errors import ConfigError
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.models.gpt2 import GPT2Config
from jaxdist.models.presets import PRESETS
from jaxdist.strategy import ParallelConfig
from jaxdist.train.program import Program, build_program
from tests import planted_bugs
from tests.support import fuzz

TEXT = "the quick brown fox jumps over the lazy dog; " * 400
SMALL = ["--num-layers", "2", "--width", "32", "--num-heads", "4", "--seq-len", "32", "--batch-size", "8"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_train_learns_writes_and_says_what_it_runs(capsys, tmp_path, text):
    out = tmp_path / "run"
    words = f"--mesh dp=2,tp=2 --data {text} --out {out} --steps 60 --lr 0.01 --compiler-options".split()
    options = ["xla_cpu_enable_fast_min_max=true", "xla_cpu_prefer_vector_width=256"]
    code, stdout, _ = run(capsys, "train", *words, *options, *SMALL)
    assert code == 0
    for said in ("dp=2,tp=2", "SIMULATED", "MiB a device", "unigram entropy", "blocks.attention.w_qkv", "done"):
        assert said in stdout
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 61))
    fields = "step loss grad_norm lr tokens step_seconds input_seconds tokens_per_second batch grad_norms seconds"
    assert set(lines[0]) == set(fields.split())
    evaluated = {line["step"]: line["held_out_loss"] for line in lines if "held_out_loss" in line}
    assert list(evaluated) == [50, 60] and all(f"held-out loss {loss:.4f}" in stdout for loss in evaluated.values())
    assert lines[0]["tokens"] == 8 * 32
    summary = json.loads((out / "summary.json").read_text())
    assert summary["held_out_loss"] == evaluated[60]
    assert summary["held_out_loss"] < summary["unigram_entropy"] < summary["first_held_out_loss"]
    assert len(summary["epochs"]) == 1 and summary["epochs"][0] > 0
    config = json.loads((out / "config.json").read_text())
    assert config["parallel"]["mesh"]["tp"] == 2 and config["model"]["width"] == 32 and "SIMULATED" in config["devices"]
    assert config["compiler_options"] == {"xla_cpu_enable_fast_min_max": True, "xla_cpu_prefer_vector_width": "256"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("more", ["--mesh dp=2,tp=2 --zero 3 --sp", "--mesh dp=3 --batch-size 9"])
def test_train_gives_the_losses_of_one_device(capsys, tmp_path, text, more):
    batch, data = [], text
    if "9" in more:
        batch, data = ["--batch-size", "9"], f"{text}=0.6,{tmp_path}/more.npy=0.4"
        np.save(tmp_path / "more.npy", np.arange(5000) % 100)
    common = ["--data", data, "--steps", "3", "--dropout", "0.1", *SMALL]
    run(capsys, "train", *common, "--out", tmp_path / "mesh", *more.split())
    run(capsys, "train", *common, "--out", tmp_path / "one", *batch)
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("mesh", "one")
    ]
    np.testing.assert_allclose(*losses, rtol=2e-5)


def test_train_that_diverges_says_so_and_leaves_no_summary(capsys, tmp_path, text):
    args = ["--data", text, "--steps", "30", "--lr", "1e30", "--warmup-steps", "0", "--clip-norm", "1e30", *SMALL]
    code, stdout, stderr = run(capsys, "train", *args, "--out", tmp_path / "run")
    assert (
        code == 1
        and "is not finite" in stdout
        and "loss" in stdout
        and "lower --lr" in stdout
        and "Traceback" not in stderr
    )
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_train_in_every_dtype(capsys, tmp_path, text, dtype):
    args = ["--mesh", "dp=2", "--zero", "2", "--data", text, "--steps", "8", "--dtype", dtype, *SMALL]
    code, _, _ = run(capsys, "train", *args, "--out", tmp_path / "run")
    jax.config.update("jax_enable_x64", False)  # the program switched it on for float64
    assert code == 0
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 0.1


def test_verify_prints_every_leaf_and_writes_json(capsys, tmp_path):
    path = tmp_path / "found.json"
    args = ("--mesh", "dp=2,tp=2", "--zero", "2", "--sp", "--num-layers", "2", "--steps", "1", "--json", path)
    code, stdout, _ = run(capsys, "verify", *args)
    assert code == 0
    assert "1 of 1 strategies compute what one device computes" in stdout
    (found,) = json.loads(path.read_text())
    names = {d["name"] for d in found["differences"] if d["kind"] == "gradient"}
    assert {"tokens", "positions", "ln_final.scale", "blocks.mlp.w_up[0]", "blocks.mlp.w_up[1]"} <= names
    assert len(names) == 4 + 2 * 12
    assert found["ok"] and found["sent_bytes_per_step"] > 0
    arrays, numbers = {"gradient", "parameter", "moment"}, {"loss", "gradient norm", "learning rate", "counter"}
    assert {d["kind"] for d in found["differences"]} == arrays | numbers


def test_verify_exits_1_on_a_difference(monkeypatch, capsys):
    """A tolerance nothing can meet stands for a wrong run: the verdict must reach the exit code."""
    monkeypatch.setitem(parity.GRADIENT_TOLERANCE, "float32", 1e-12)
    monkeypatch.setattr(parity, "NEAR", 0)
    args = ("--mesh", "dp=2", "--num-layers", "2", "--width", "16", "--num-heads", "2", "--steps", "1")
    code, stdout, _ = run(capsys, "verify", *args)
    assert code == 1
    assert "DIFFERS" in stdout and "0 of 1" in stdout and "of the reference" in stdout


@pytest.mark.exhaustive
def test_verify_with_an_oracle(capsys):
    small = ("--num-layers", "1", "--width", "16", "--num-heads", "2", "--steps", "1", "--dropout", "0.1")
    code, stdout, _ = run(capsys, "verify", "--oracle", "plain", "--mesh", "dp=2", *small)
    assert code == 0 and "1 of 1 strategies compute what the oracle (plain) computes" in stdout
    code, _, stderr = run(capsys, "verify", "--oracle", "plain", "--dtype", "bfloat16", *small)
    assert code == 2 and "too coarse" in stderr


def test_planted_bugs_still_fit_the_source(tmp_path):
    """Running them is `python -m tests.planted_bugs`."""
    found = planted_bugs.all_bugs()
    assert len({bug.name for bug in found}) == len(found) > 100
    for name in planted_bugs.COPIED[:2]:
        shutil.copytree(planted_bugs.ROOT / name, tmp_path / name)
    for bug in found:
        assert bug.tests and all("::" in test for test in bug.tests), bug.name
        bug.apply(tmp_path, "--check")
        source, *hunks = re.split(r"^@@.*\n", bug.patch.read_text(), flags=re.M)
        file = (tmp_path / re.search(r"^--- a/(.*)$", source, re.M)[1]).read_text()
        for hunk in hunks:
            before = [line for line in hunk.splitlines(keepends=True) if line[0] in " -"]
            changed = [i for i, line in enumerate(before) if line[0] == "-"] or [len(before) // 2]
            around = before[max(changed[0] - 1, 0) : changed[-1] + 2]  # as much as `git apply -C1` compares
            counts = [file.count("".join(line[1:] for line in lines)) for lines in (before, around)]
            assert counts[0] == 1 or counts[1] == 1, f"{bug.name} fits {max(counts)} places"


# ---------------------------------------------------------------------------------------------------------------------
# Bad input: one message, exit code 2, nothing traced, nothing left behind
# ---------------------------------------------------------------------------------------------------------------------

WRONG_FLAGS = [
    (["--mesh", "xx=2"], "'xx'", "pp, replica, dp, ep, cp, tp"),
    (["--mesh", "ep=2"], "ep=2 over dp=1", "Use ep in [1]"),
    (["--mesh", "pp=8"], "--num-layers 4 over 8 stages", "--num-layers 8"),
    (["--mesh", "pp=2", "--microbatches", "3"], "--microbatches 3", "15 or 18"),
    (["--mesh", "pp=2", "--stages", "1,2"], "every layer once", "2,2"),
    (["--mesh", "tp=3"], "--num-heads 4 cannot be split over tp=3", "[1, 2, 4]"),
    (["--mesh", "tp=2", "--sp", "--seq-len", "33"], "--seq-len 33", "multiple of 2"),
    (["--mesh", "dp=3"], "--batch-size 16", "15 or 18"),
    (["--zero", "4"], "--zero 4", "0, 1, 2 or 3"),
    (["--remat", "auto-0.001"], "within 0.001 GiB", "more devices"),
    (["--loss-chunks", "7", "--seq-len", "64"], "--loss-chunks 7 with --seq-len 64", "--loss-chunks in"),
    (["--overlap", "--remat", "every-2"], "--overlap with --remat every-2", "--remat block"),
    (["--dropout", "1.0"], "--dropout 1.0", "0.1"),
    (["--lr", "inf"], "--lr inf", "default"),
    (["--steps", "0"], "--steps 0", "--steps 1"),
    (["--optimizer", "adafactor", "--mesh", "tp=2"], "adafactor", "--optimizer adamw"),
    (["--device", "gpu"], "--device gpu", "--device cpu"),
    (["--vocab-size", "90"], "0 <= token < 90", "--vocab-size 256"),
    (["--data", "/nonexistent/file"], "cannot be read", "existing"),
    (["--compiler-options", "xla_nope=1"], "No such compile option", "experiments.bench flags"),
    (["--mesh", "dp=16"], "16 simulated devices", "before JAX starts"),
]


@pytest.mark.parametrize(("args", "said", "remedy"), WRONG_FLAGS, ids=lambda value: str(value)[:40])
def test_wrong_input_ends_before_tracing(monkeypatch, capsys, tmp_path, text, args, said, remedy):
    monkeypatch.setattr(experiments.train, "print_resolved", lambda *_: pytest.fail("got as far as running"))
    data = [] if "--data" in args else ["--data", text]
    code, stdout, stderr = run(capsys, "train", *data, *args, "--out", tmp_path / "run")
    assert code == 2
    assert said in stderr and remedy in stderr, stderr
    assert "Traceback" not in stderr and not stdout
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_verify_runs_a_schedule_from_a_file(capsys, tmp_path):
    (tmp_path / "[").mkdir()  # what rich would take for markup that nothing opens
    (tmp_path / "[/x].txt").write_text("0: F0 F1 .  B0 W0 B1 W1\n1: .  F0 B0 F1 B1 W0 W1")
    flags = ["--mesh", "pp=2", "--schedule", tmp_path / "[/x].txt", "--microbatches", 2, "--batch-size", 4]
    code, stdout, _ = run(capsys, "verify", *flags, "--steps", 1)
    assert code == 0 and "1 of 1 strategies" in stdout


@pytest.mark.parametrize(
    "args", [["--no-such-flag"], ["--dtype", "int8"], ["--steps", "many"], ["--grad-sync", "ring"]]
)
def test_what_the_parser_refuses(capsys, args):
    code, _, stderr = run(capsys, "train", *args)
    assert code == 2
    assert args[0] in stderr


def test_presets_have_their_names_sizes():
    sizes = {"12m": 12.5e6, "gpt2-124m": 124e6, "gpt2-350m": 355e6, "gpt2-774m": 774e6, "gpt2-1.5b": 1558e6}
    sizes |= {"7b": 6.7e9, "70b": 71e9, "175b": 175e9}
    for name, expected in sizes.items():
        m = CommonFlags(name).model_config()
        count = m.num_layers * (12 * m.width**2 + 13 * m.width) + (m.vocab_size + m.seq_len + 2) * m.width
        assert math.isclose(count, expected, rel_tol=0.03), (name, count)


# ---- one border for every program ----


def test_who_has_read_enough_ends_a_program_or_asks_it_to_stop():
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        entry.SafeConsole(file=Gone()).print("a")
    asked, console = [], entry.SafeConsole(file=Gone())
    console.when_broken = lambda: asked.append("once")
    console.print("a")
    console.print("b")
    assert asked == ["once"]


def test_programs_speak_where_no_terminal_is_known_and_their_input_is_closed(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "0")
    monkeypatch.setattr(sys, "stdin", None)
    code, _, stderr = run(capsys, "generate", "nowhere", "--prompts", "-")
    assert code == 2 and "must have a line" in stderr


def test_train_looks_at_every_flag(monkeypatch, capsys, tmp_path, text):
    """A flag that nothing reads would be ignored."""
    read, begin = set(), experiments.train.main

    @functools.wraps(begin)
    def watching(flags, console):
        return begin(fuzz.watched(flags, read), console)

    monkeypatch.setattr(experiments.train, "main", watching)
    monkeypatch.setattr(TrainFlags, "_must_be_equal", lambda self: {})
    args = ["--data", text, "--steps", "2", "--out", tmp_path / "run", "--checkpoint-every", "1", *SMALL]
    assert run(capsys, "train", *args)[0] == 0
    assert {field.name for field in dataclasses.fields(TrainFlags)} - {"config"} <= read


def test_a_sample_of_odd_inputs():
    """`python -m tests.support.fuzz --inputs 1000` tries more. It forks, so it has a process of its own."""
    command = [sys.executable, "-m", "tests.support.fuzz", "--inputs", "25", "--bound", "120", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyError("x"), 71, "This is a fault of jaxdist"),
        (ValueError(), 71, "defect: ValueError: ValueError."),
        (MemoryError(), 1, "not enough memory"),
        (RuntimeError("RESOURCE_EXHAUSTED: 5 GiB"), 1, "not enough memory"),
        (RuntimeError("RESOURCE_EXHAUSTED: a.pb; No space left on device"), 74, "No space left"),
        (OSError(28, "No space left on device"), 74, "the output cannot be written"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_what_escapes_a_program_is_one_line(monkeypatch, capsys, tmp_path, error, code, said):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(entry, "_abandon_output", lambda: None)
    monkeypatch.setattr(entry.processes, "leave", sys.exit)

    def fail(flags, console):
        raise error

    with pytest.raises(SystemExit) as stop:
        run_program(fuzz.FuzzFlags, fail, "test", args=[])
    assert stop.value.code == code
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err and err.count("\n") <= 1
    reports = list(tmp_path.glob("jaxdist-defect-*.txt"))
    assert len(reports) == (code == 71)
    for report in reports:
        assert str(report) in err and "Traceback (most recent call last)" in report.read_text()


def test_text_from_elsewhere_cannot_command_a_terminal(capsys):
    hostile = "\x1b]0;title\x07 \x1b[31mred \udcff \u202e"
    code, _, err = run(capsys, "train", "--data", hostile)
    assert code == 2 and r"\x1b]0;title\x07" in err and r"\udcff" in err and not {"\x1b", "\x07", "\u202e"} & set(err)
    code, _, err = run(capsys, "train", "--attention", "\x1b[31m")
    assert code == 2 and r"\x1b[31m" in err and "\x1b[31m'" not in err


def test_an_output_that_fails_leaves_the_one_before_it(monkeypatch, capsys, tmp_path):
    """Written through a link, to the file it leads to; refused on a full disk without a byte of either lost."""
    (tmp_path / "old.json").write_text("the old one")
    (tmp_path / "link").symlink_to(tmp_path / "old.json")
    entry.require_writable("--json", str(tmp_path / "link"))
    entry.require_writable("--json", str(tmp_path / "new"))
    with monkeypatch.context() as patched, pytest.raises(ConfigError):
        patched.setattr(files.os, "fsync", mock.Mock(side_effect=OSError(28, "No space left on device")))
        entry.write_output("--json", str(tmp_path / "link"), "the new one")
    assert {path.name for path in tmp_path.iterdir()} == {"old.json", "link"}
    assert (tmp_path / "old.json").read_text() == "the old one"
    entry.write_output("--json", str(tmp_path / "link"), "the new one")
    assert (tmp_path / "old.json").read_text() == "the new one" and (tmp_path / "link").is_symlink()
    entry.write_output("--json", "/dev/null", "no file is made there")


def test_every_output_is_written_aside():
    """Beside `write_whole`: a device, a nonce that is removed again, and text that two programs train on."""
    allowed = {"entry.py": 1, "run_folder.py": 1, "faults.py": 1, "chaos.py": 4}
    root = Path(entry.__file__).parent
    paths = [*root.rglob("*.py"), *Path(files.__file__).parent.rglob("*.py")]
    found = {path.name: len(re.findall(r"write_(?:text|bytes)\(", path.read_text())) for path in paths}
    assert {name: count for name, count in found.items() if count} == allowed


def test_a_pipe_is_not_waited_for(capsys, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, said in ((tmp_path / "pipe", "cannot be written"), ("/dev/full", "No space left")):
        code, _, err = run(capsys, "verify", "--json", path)
        assert code == 2 and said in err


def test_compiler_options_reach_the_step(monkeypatch, capsys, text):
    given = []

    def compile_step(program, options):
        given.append(options)
        raise ConfigError("a test", "it needs no more", "Stop")

    monkeypatch.setattr(Program, "compile_step", compile_step)
    option = "xla_cpu_enable_fast_min_max=true"
    assert run(capsys, "train", "--data", text, *SMALL, "--compiler-options", option)[0] == 2
    assert given == [{"xla_cpu_enable_fast_min_max": True}]


def test_the_step_is_compiled_with_its_options():
    config = RunConfig(PRESETS["proof"], ParallelConfig(), batch_size=2)
    program = build_program(config, make_mesh(config.parallel.mesh, jax.devices()))
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_nope"):
        program.compile_step({"xla_nope": "1"})


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("0: F0 .  .  B0 W0\n1: .  F0 B0", "stage 1: W of micro-batch 0, chunk 0 is missing"),
        (
            "0: F0 F0 .  B0 W0\n1: .  F0 B0 W0",
            "tick 1, stage 0: F of micro-batch 0, chunk 0",
        ),
        ("0: F0 .  B0 W0\n1: .  F0 B0 W0", "tick 2, stage 0: B of micro-batch 0, chunk 0"),
        ("0: F0 .  .  B0 W0\n1: .  F0 B0 W0", "is for 2 stages, 1 micro-batches and 1 chunks"),
    ],
)
def test_a_schedule_from_a_file_is_checked(capsys, tmp_path, text, table, said):
    (tmp_path / "table.txt").write_text(table)
    flags = ["--mesh", "pp=2", "--schedule", tmp_path / "table.txt", "--microbatches", 2]
    code, _, stderr = run(capsys, "train", "--data", text, *flags, "--out", tmp_path / "run")
    assert code == 2 and said in stderr and "Traceback" not in stderr


def test_unwritable_out(capsys, tmp_path, text):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        code, _, stderr = run(capsys, "train", "--data", text, "--out", out, *SMALL)
        assert code == 2 and "cannot be written" in stderr


def test_unwise_combinations_are_said():
    def notes(**parallel):
        return RunConfig(GPT2Config(2, 32, 4, 128, 32, 256), ParallelConfig(**parallel)).warnings()

    assert "dp and cp, and both are 1" in notes(zero=2)[0]
    assert "tp=1" in notes(sp=True)[0]
    slow = RunConfig(GPT2Config(2, 32, 4, 128, 32, 256), optimizer=OptimizerConfig(warmup_steps=9), steps=8)
    assert "the rate rises over the whole run" in slow.warnings()[0]
    assert not dataclasses.replace(slow, optimizer=OptimizerConfig(), steps=8).warnings()
    for ignored in (
        {"reshard_after_forward": False},
        {"bucket_mb": 1.0, "grad_sync": "flat"},
        {"schedule": "zb-v"},
        {"microbatches": 2},
        {"chunks": 2},
        {"stages": "balanced"},
    ):
        with pytest.raises(ConfigError, match="would change nothing"):
            notes(**ignored)
    pipelined = notes(mesh=parse_mesh("pp=2,dp=2"), zero=3, reshard_after_forward=False, microbatches=4)
    assert "gathers the weights of blocks again" in pipelined[0]
    assert not notes()


@pytest.mark.parametrize(
    ("said", "in_flags"),
    [
        ("zero=4: stages 0 to 3. Use zero=0, 1, 2 or 3.", "--zero 4: stages 0 to 3. Use --zero 0, 1, 2 or 3."),
        ("mesh='dp=2,,tp=2': twice. Write mesh='dp=2'.", "--mesh dp=2,,tp=2: twice. Write --mesh dp=2."),
        ("Add sp=True, or tp_ring='none'", "Add --sp, or --tp-ring none"),
        ("reshard_after_forward=False: a pipeline", "--no-reshard-after-forward: a pipeline"),
        ("(lr=1e-05) x seed=3.", "(--lr 1e-05) x --seed 3."),
        ("Use loss_chunks in [1, 2] or seq_len/2", "Use --loss-chunks in [1, 2] or seq_len/2"),
        ("data='it\\'s \\x1b[1m'", "--data 'it'\"'\"'s \\x1b[1m'"),
        ("out='': no folder", "--out '': no folder"),
        (
            "--drill nan:step=5 model.width=3 dp=2 beta=1 a_zero=1",
            "--drill nan:step=5 model.width=3 dp=2 beta=1 a_zero=1",
        ),
        ("'mesh=dp=2 zerro=3': 'zerro'", "'mesh=dp=2 zerro=3': 'zerro'"),
    ],
)
def test_a_message_of_the_library_is_said_in_flags(said, in_flags):
    assert entry.in_flags(said, TrainFlags) == in_flags
    assert entry.in_flags(said, int) == said
