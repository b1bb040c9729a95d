"""A user's own model by name: what every program does with it, what it is refused for, and whose fault an error is."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import tyro
from llama import Llama
from support.programs import run

from experiments.cli import flags_of
from experiments.train import TrainFlags
from jaxdist import console
from jaxdist.checkpoint.checkpoints import Checkpoints
from jaxdist.config import RunConfig
from jaxdist.errors import ConfigError
from jaxdist.mesh import MeshShape
from jaxdist.models.registry import ModelFlags, find_model, source_digest, source_of
from jaxdist.strategy import ParallelConfig

MODELS = Path(__file__).resolve().parents[1] / "support" / "models"
MODEL = """
from dataclasses import dataclass
from llama import Llama

@dataclass(frozen=True)
class Mine(Llama):
    depth: tuple[int, ...] = (1, 2)

SMALL = Mine(width=32)
NUMBER = 3

class NotFrozen(Llama.__bases__[0]):
    outer = block = embed = layer = loss = None

@dataclass(frozen=True)
class NoDefault(Llama.__bases__[0]):
    width: int
    num_layers: int = 1
    seq_len: int = 8
    vocab_size: int = 16
    outer = block = embed = layer = loss = None

@dataclass(frozen=True)
class NoSizes(Llama.__bases__[0]):
    outer = block = embed = layer = loss = None

@dataclass(frozen=True)
class Unfinished(Llama.__bases__[0]):
    num_layers: int = 1

@dataclass(frozen=True)
class Odd(Llama):
    rule: object = len

@dataclass(frozen=True)
class Picky(Llama):
    def __post_init__(self):
        assert self.width == 64, "only 64 will do"

@dataclass(frozen=True)
class Broken(Llama):
    def layer(self, ctx, kind, p, x, index):
        return x @ x
"""
NAMES = itertools.count()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a new module in the current folder with the models above, or with the text that is given."""

    def make(text: str = MODEL) -> str:
        name = f"own_{next(NAMES)}"
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [*sys.path])
        return name

    return make


# ---- it works ----


def test_verify_proves_a_model_in_the_current_folder():
    """With -P the current folder is not on the path, as it is not for an installed `jaxdist`."""
    words = "-P -m jaxdist verify --model llama:Llama --mesh dp=2,tp=2 --zero 3 --steps 1"
    environment = {**os.environ, "PYTHONPATH": str(MODELS.parents[2])}
    done = subprocess.run([sys.executable, *words.split()], cwd=MODELS, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "1 of 1 strategies compute what one device computes" in done.stdout, done.stderr
    assert "blocks.w_gate[3]" in done.stdout


def test_train_writes_the_class_down_and_resumes_that_alone(capfd, tmp_path, module):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 400)
    common = ["--data", tmp_path / "text.txt", "--steps", 3, "--checkpoint-every", 1, "--eval-windows", 8]
    common += ["--out", tmp_path / "run", "--batch-size", 8, "--num-layers", 1]
    code, out, err = run(capfd, "train", "--model", "llama:Llama", *common, "--drill", "term:step=2")
    assert code == 143 and "Llama(num_layers=1, width=64" in out, err
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["model"]["class"] == "llama:Llama" and config["model"]["num_kv_heads"] == 4
    name = module()
    for other, said in (("proof", "GPT-2"), (f"{name}:Mine", f"{name}:Mine")):
        code, _, err = run(capfd, "train", "--model", other, *common, "--vocab-size", 256)
        assert code == 2 and f"its model is llama:Llama there and {said} here" in err
        code, _, err = run(capfd, "train", "--model", other, *common[:-5], tmp_path / "two", "--restore", common[9])
        assert code == 2 and f"its model is llama:Llama there and {said} here" in err
    code, out, _ = run(capfd, "train", "--model", "llama:Llama", *common)
    assert code == 0 and "resumed after step" in out
    again = ["--weights", tmp_path / "run", "--lr", 1e-3, *common[:-5], tmp_path / "three", *common[-4:]]
    code, out, err = run(capfd, "train", "--model", "llama:Llama", *again)
    assert code == 0 and "started from the parameters of step 3" in out, err
    for trust, expected in ((), 2), (["--trust"], 0):
        given = [tmp_path / "run", "--data", tmp_path / "text.txt", "--windows", 8, *trust]
        assert run(capfd, "evaluate", *given)[0] == expected


def test_a_module_is_hashed_without_running_it(module):
    name = module("raise SystemExit('it ran')")
    assert source_of(f"{name}:X") == Path.cwd() / f"{name}.py" and len(source_digest(f"{name}:X")) == 64
    assert source_of("tiny") is None and source_digest("no_such_module:X") == source_digest("tiny") == ""
    flags = [TrainFlags(model=f"{module(text)}:X")._must_be_equal() for text in ("a = 1", "a = 2")]
    of_source = [[value for key, value in facts.items() if key.startswith("the source of own_")] for facts in flags]
    assert of_source[0] and of_source[1] and of_source[0] != of_source[1]


STRANGER = "open('ran', 'w').close()\nfrom llama import Llama as Model\n"
OPENS = {
    "generate": ["generate", "RUN", "--prompt", "a"],
    "evaluate": ["evaluate", "RUN"],
    "convert": ["convert", "ours", "RUN", "--out", "exported"],
    "weights": ["train", "--model", "proof", "--weights", "RUN", "--lr", "1e-3", "--out", "new"],
    "restore": ["train", "--model", "proof", "--restore", "RUN", "--out", "new"],
    "resume": ["train", "--model", "proof", "--out", "RUN"],
    "report": ["report", "RUN"],
    "config": ["train", "--config", "RUN/run.toml"],
}


@pytest.mark.parametrize("how", ["outside", "inside", "entry"])
@pytest.mark.parametrize("program", OPENS)
def test_no_program_runs_the_code_that_a_file_names(capfd, tmp_path, monkeypatch, program, how):
    """Beside the run, in it by a dotted path, within adapters; from the run's folder; by the command `jaxdist`."""
    folder, name = tmp_path / "run", f"stranger_{next(NAMES)}"
    checkpoints = Checkpoints(folder / "checkpoints")
    for step, (cls, wrap) in enumerate(((f"{name}:Model", 0), (f"run.{name}:Model", 0), (f"{name}:Model", 1))):
        model = {"class": cls, "num_layers": 1}
        model = {"class": "jaxdist.models.lora:LoRA", "base": model} if wrap else model
        progress = {"config": {"model": model}, "progress": {}, "data": {}}
        checkpoints.save(step, {"params.x": jax.numpy.zeros(1)}, progress)
        checkpoints.finish()
        (folder / "config.json").write_text(json.dumps({"model": model}))
        (folder / "metrics.jsonl").touch()
        (folder / "run.toml").write_text(f'[model]\nname = "{cls}"\n')
        for place in (folder, tmp_path):
            (place / f"{name}.py").write_text(STRANGER)
        monkeypatch.chdir(tmp_path if how == "outside" else folder)
        monkeypatch.setattr(sys, "path", [*sys.path])
        words = [word.replace("RUN", "run" if how == "outside" else ".") for word in OPENS[program]]
        if how == "entry":
            monkeypatch.setattr(sys, "argv", ["jaxdist", *words])
            with pytest.raises(SystemExit) as stop:
                console.main()
            code, err = stop.value.code or 0, capfd.readouterr().err
        else:
            code, _, err = run(capfd, *words)
        assert code == (0 if program == "report" else 2) and "defect" not in err, err
        assert program == "report" or "model is" in err or "model's class" in err, err
        assert not [*tmp_path.rglob("ran")] and not any(name in module for module in sys.modules)


def test_sizes_override_the_fields_of_the_model(module):
    assert ModelFlags("llama:Llama", num_layers=2, width=128).model_config() == Llama(num_layers=2, width=128)
    assert ModelFlags("tiny", width=64).model_config().ffn_width == 256
    assert ModelFlags("tiny", width=64, ffn_width=100).model_config().ffn_width == 100
    assert ModelFlags("tiny", dropout=0.1).model_config().dropout == 0.1
    assert ModelFlags(f"{module()}:SMALL", num_layers=1).model_config().width == 32


def test_the_flags_of_a_run_name_the_model(module):
    name = module()
    for model, words in (
        (Llama(), ["--model", "llama:Llama"]),
        (Llama(num_layers=2), ["--model", "llama:Llama", "--num-layers", "2"]),
        (find_model(f"{name}:SMALL"), ["--model", f"{name}:SMALL"]),
    ):
        config = RunConfig(model, ParallelConfig(MeshShape(dp=2)))
        assert flags_of(config) == ["--mesh", "dp=2", *words] or flags_of(config) == [*words, "--mesh", "dp=2"]
        assert tyro.cli(TrainFlags, args=flags_of(config)).run_config() == config
    with pytest.raises(ConfigError, match="in its module"):
        flags_of(RunConfig(dataclasses.replace(find_model(f"{name}:SMALL"), depth=(9,))))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llamas", "there is no preset of that name"),
        ("no_such_module:Llama", "there is no module no_such_module in the current folder or on PYTHONPATH"),
        ("no_such_module.deep:Llama", "there is no module no_such_module in"),
        ("llama:Llamas", "the module llama has no Llamas. Use llama:Llama"),
        ("llama.py:Llama", "named as `import` names them. Write llama:MyModel"),
        ("..:Llama", "named as `import` names them"),
        (":", "named as `import` names them"),
        ("json:JSONDecoder", "jaxdist.models.base.Model"),
        ("OWN:NUMBER", "jaxdist.models.base.Model"),
        ("OWN:NotFrozen", "frozen dataclass"),
        ("OWN:NoDefault", "width"),
        ("OWN:Unfinished", "block, embed, layer, outer, head or loss"),
        ("OWN:NoSizes", "num_layers"),
        ("OWN:Odd", "field rule"),
    ],
)
def test_a_wrong_name_is_one_line(capfd, module, name, said):
    code, out, err = run(capfd, "verify", "--model", name.replace("OWN", module()))
    assert code == 2 and said in err and err.count("\n") == 1 and not out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\n1 / 0", "line 2 raised ZeroDivisionError: division by zero"),
        ("x = 1\nclass X(:", "line 2 raised SyntaxError: invalid syntax"),
        ("import no_such_thing", "line 1 raised ModuleNotFoundError: No module named 'no_such_thing'"),
        ("import sys\n\nsys.exit('done')", "line 3 raised SystemExit: done"),
        ("class X:\n    pass\n\n\nx = X().y", "line 5 raised AttributeError"),
    ],
)
def test_an_exception_in_the_module_is_the_users(capfd, module, text, said):
    name = module(text)
    code, _, err = run(capfd, "verify", "--model", f"{name}:Mine")
    assert code == 2 and f"{name}.py, {said}" in err and err.count("\n") == 1 and "fault of jaxdist" not in err
