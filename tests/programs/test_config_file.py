"""--config: a file's settings are those of the flags, flags override them, and a run leaves the file that gives it."""

import dataclasses
import json
import os
import tomllib

import pytest
import tyro
from support.programs import run

from experiments import config_file, settings
from experiments.cli import CommonFlags
from experiments.config_file import PROGRAMS, SHARED, read_flags, settings_text
from experiments.entry import run_program
from experiments.plan import PlanFlags
from experiments.strategies import STRATEGIES
from experiments.train import TrainFlags
from experiments.verify import VerifyFlags
from jaxdist.models.registry import ADAPTER_FLAGS, SIZES

FLAGS = {"train": TrainFlags, "verify": VerifyFlags, "plan": PlanFlags}
SMALL = """
[model]
name = "proof"
num_layers = 2
[parallel]
mesh = "dp=2"
zero = 1
[run]
batch_size = 8
steps = 2
[optimizer]
name = "lion"
lr = 1
[train]
eval_windows = 1
[verify]
steps = 1
[plan]
nodes = 2
"""
# A value other than the default for every flag of train that a file may hold.
OTHER = {
    "unroll_layers": "yes",
    "xla": "stable",
    "compiler_options": ("a=1", 'b="2"'),
    "restore": 'a "quoted"\\path\twith ünïcode \x7f 🙂',
    "data": "-",
    "on_nonfinite": "skip",
    "on_spike": "stop",
    "device": "cpu",
    "keep_last": None,
    "grace": float("inf"),
    "loss_scale": 1e22,
    "eps": 1e-9,
    "lr": 3.0,
    "mesh": "pp=2,dp=2",
    "model": "7b",
    "schedule": "zb-v",
    "stages": "1,2",
    "remat": "every-2",
    "dtype": "float16",
    "reduce_dtype": "bfloat16",
    "optimizer": "lion",
    "cp_kind": "usp-2",
    "tp_ring": "two-way",
    "grad_sync": "flat",
    "attention": "xla",
    "lr_schedule": "linear",
    "muon_scale": "shape",
    "muon_coefficients": "dion",
    "muon_bf16": True,
    "token_dtype": "uint32",
}


def parsed(program: str, *args):
    """The flags as `main` gets them."""
    found = []
    with pytest.raises(SystemExit):
        run_program(FLAGS[program], lambda flags, console: found.append(flags), program, [*map(str, args)])
    return found[0]


def refused(capsys, program: str, *args) -> str:
    """The one line that a program ends with."""
    code, out, err = run(capsys, program, *args)
    assert code == 2 and not out and err.count("\n") == 1, (out, err)
    return err


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "run.toml"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def other_value(field: dataclasses.Field):
    if field.name in OTHER:
        return OTHER[field.name]
    default = field.default
    match default:
        case bool():
            return not default
        case int() | float():
            return default + 1
        case _:
            return 7 if "int" in str(field.type) else 7.0 if "float" in str(field.type) else "7"


# ---- reading ----


def test_a_file_sets_flags_and_flags_override_it(write):
    path = write(SMALL)
    flags = parsed("train", "--config", path)
    assert (flags.model, flags.num_layers, flags.mesh, flags.zero, flags.steps) == ("proof", 2, "dp=2", 1, 2)
    assert (flags.optimizer, flags.lr, flags.eval_windows) == ("lion", 1.0, 1) and type(flags.lr) is float
    flags = parsed("train", "--zero", 0, f"--config={path}", "--eval-windows", 3)
    assert (flags.model, flags.num_layers, flags.zero, flags.eval_windows) == ("proof", 2, 0, 3)


def test_each_program_reads_its_own_section(write):
    path = write(SMALL)
    assert parsed("plan", "--config", path).nodes == 2
    flags = parsed("verify", "--config", path)
    assert flags.mesh == "dp=2" and flags.batch_size == 8
    assert (flags.steps, flags.lr) == (1, VerifyFlags.lr)  # a proof's own, but for the section [verify]


def test_another_model_has_its_own_sizes(write):
    path = write(SMALL)
    flags = parsed("train", "--config", path, "--model", "tiny", "--width", 64)
    assert (flags.model, flags.num_layers, flags.width, flags.zero) == ("tiny", None, 64, 1)
    assert parsed("train", "--config", path, "--preset", "proof").num_layers == 2
    assert parsed("train", "--config", write("[model]\nwidth = 64"), "--model", "7b").width == 64


def test_json_is_read_as_well(write):
    path = write(json.dumps(tomllib.loads(SMALL)), "run.json")
    assert parsed("train", "--config", path) == dataclasses.replace(
        parsed("train", "--config", write(SMALL)), config=str(path)
    )


def test_a_setting_of_an_earlier_version_is_read(write):
    for old, new in (("true", "yes"), ("false", "auto"), ('"no"', "no")):
        path = write(f"[parallel]\nunroll_layers = {old}")
        assert parsed("train", "--config", path).unroll_layers == new
    path = write("[run]\nbatch_size = 8\n[train]\neval_batches = 4")
    assert parsed("train", "--config", path).eval_windows == 32


def test_an_empty_file_changes_nothing(write):
    path = write("")
    assert parsed("train", "--config", path) == TrainFlags(config=str(path))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", "Write sections: model, parallel, run,"),
        ("[x]", "Use model, parallel, run,"),
        ("model = 1", "Write [model]"),
        ("lr = 0.1", "Write it below [optimizer]"),
        ("[model]\npreset = 'tiny'", "[model] has no 'preset'. Use name, num_layers,"),
        ("[parallel]\nzeros = 1", "[parallel] has no 'zeros'. Use mesh, zero,"),
        ("[train]\nno = 1", "[train] has no 'no'"),
        ("[train]\nconfig = 'b.toml'", "[train] has no 'config'"),
        ("[parallel]\nzero = '1'", 'parallel.zero = "1", and it must be a whole number'),
        ("[parallel]\nzero = true", "parallel.zero = true, and it must be a whole number"),
        ("[parallel]\nsp = 1", "parallel.sp = 1, and it must be true or false"),
        ("[parallel]\nmesh = {dp = 2}", 'parallel.mesh = {"dp": 2}, and it must be text'),
        ("[parallel]\nmicrobatches = 1.5", 'parallel.microbatches = 1.5, and it must be a whole number or "none"'),
        ("[precision]\ndtype = 'int8'", 'precision.dtype = "int8", and it must be one of float32, bfloat16,'),
        ("[optimizer]\nlr = 'high'", 'optimizer.lr = "high", and it must be a number'),
        ("[train]\ncompiler_options = 'a=1'", "and it must be a list, each text"),
        ("[train]\ncompiler_options = [1]", "and it must be a list, each text"),
        ("[parallel]\nzero = 4", "--zero 4"),
        ("\ufeff[parallel]\nzero = 4", "--zero 4"),  # a byte order mark is no part of it
        ("[parallel]\nmesh = 'dp=0'", "at least 1"),
        ("[model]\nname = 'tinny'", "there is no preset of that name"),
        ("[model", "it cannot be read as TOML"),
        ("a = " + "[" * 5000, "nested too deep"),
        ("[optimizer]\nlr = 1" + "0" * 400, "and it must be a number"),
        ("[optimizer]\nlr = nan", "--lr nan"),
        ("[run]\nsteps = 2026-01-01", "and it must be a whole number"),
    ],
)
def test_what_a_file_may_not_say(capsys, write, text, said):
    assert said in refused(capsys, "train", "--config", write(text))


def test_what_is_no_file_of_settings(capsys, tmp_path, write):
    (tmp_path / "latin.toml").write_bytes(b"# caf\xe9")
    os.mkfifo(tmp_path / "fifo.toml")
    for name, said in (
        ("nothing.toml", "No such file"),
        (".", "Is a directory"),
        ("latin.toml", "utf-8"),
        ("fifo.toml", "not a regular file"),
    ):
        assert said in refused(capsys, "train", "--config", tmp_path / name)
    assert "it cannot be read as JSON" in refused(capsys, "plan", "--config", write("{", "cut.json"))
    assert "list.json" in refused(capsys, "verify", "--config", write("[]", "list.json"))


def test_a_wrong_flag_beside_a_file_is_refused_as_ever(capsys, write):
    code, _, err = run(capsys, "train", "--config", write(SMALL), "--zero", "many")
    assert code == 2 and "--zero" in err


# ---- writing ----


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(TrainFlags)])
def test_every_flag_of_a_run_comes_back(tmp_path, name):
    field = TrainFlags.__dataclass_fields__[name]
    flags = dataclasses.replace(TrainFlags(), **{name: other_value(field)})
    assert getattr(flags, name) != field.default
    config = CommonFlags().run_config()
    values = {setting.flag: getattr(flags, setting.flag) for setting in settings.SETTINGS}
    (tmp_path / "a.toml").write_text(text_of(flags, config, values))
    found = TrainFlags(**read_flags(TrainFlags, "train", str(tmp_path / "a.toml")))
    sizes = dataclasses.asdict(config.model)
    wanted = TrainFlags() if name in TrainFlags.NOT_KEPT else flags
    if name not in SIZES:  # a file says every size
        wanted = dataclasses.replace(wanted, **sizes)
        assert found == wanted


def text_of(flags, config, values) -> str:
    """The file of flags whose configuration need not be valid."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings.Setting, "of", lambda setting, config: values[setting.flag])
        return settings_text("train", flags, config)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_every_strategy_comes_back(tmp_path, strategy):
    config = strategy.run_config()
    (tmp_path / "a.toml").write_text(settings_text("train", TrainFlags(), config))
    assert TrainFlags(**read_flags(TrainFlags, "train", str(tmp_path / "a.toml"))).run_config() == config


def test_a_name_that_is_not_utf8_is_left_out(tmp_path):
    flags = TrainFlags(data=os.fsdecode(b"caf\xe9"))
    (tmp_path / "a.toml").write_text(settings_text("train", flags, flags.run_config()))
    assert read_flags(TrainFlags, "train", str(tmp_path / "a.toml")).get("data") is None


def test_a_run_leaves_the_file_that_is_the_same_run(capsys, tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 400)
    args = ["--model", "proof", "--num-layers", "1", "--width", "16", "--num-heads", "2", "--vocab-size", "256"]
    args += ["--data", str(tmp_path / "text.txt"), "--steps", "2", "--batch-size", "8", "--mesh", "dp=2", "--zero", "3"]
    args += ["--dropout", "0.1", "--eval-windows", "8", "--beta2", "0.9", "--out", str(tmp_path / "run")]
    assert run(capsys, "train", *args)[0] == 0
    path = tmp_path / "run" / config_file.NAME
    again = parsed("train", "--config", path)
    given = tyro.cli(TrainFlags, args=args)
    assert again.run_config() == given.run_config() and again.data == given.data and again.eval_windows == 8
    assert again.out is None
    for said, words in (
        ("is complete: nothing is left to do", ["train", "--config", path, "--out", tmp_path / "run"]),
        ("1 of 1 strategies compute", ["verify", "--config", path, "--batch-size", "2", "--mesh", "dp=2"]),
    ):
        code, out, _ = run(capsys, *words)
        assert code == 0 and said in out


def test_sections_and_programs_do_not_share_a_name():
    assert not set(SHARED) & set(PROGRAMS) and set(SHARED) == {"model", "run", "parallel", "optimizer", "precision"}
    assert set(SHARED["model"]) == {"name", *SIZES, *ADAPTER_FLAGS}
