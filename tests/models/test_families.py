"""Every published family through every program: no cell of the table is a hope. `-m exhaustive` runs it whole."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support.families import FAMILIES
from support.programs import run

from jaxdist.checkpoint.weights import write_weights
from jaxdist.config import RunConfig
from jaxdist.models.huggingface import CONFIG, model_from_config
from jaxdist.parity import random_parameters
from jaxdist.placement import make_layout
from jaxdist.strategy import ParallelConfig

STEPS = ["--batch-size", "4", "--steps", "2", "--lr", "1e-3", "--eval-windows", "8", "--device", "cpu"]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A family -> a folder of transformers with random weights and a tokenizer of words, and prepared tokens."""
    tokenizers = pytest.importorskip("tokenizers", reason="pip install -e '.[data]'")
    words = {"</s>": 0} | {f"w{number}": number for number in range(1, 131)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w1"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>"])
    root = tmp_path_factory.mktemp("families")
    rng = np.random.default_rng(0)
    (root / "text.txt").write_text("\n".join(" ".join(f"w{n}" for n in rng.integers(1, 131, 12)) for _ in range(200)))

    @cache
    def folder(family: str) -> Path:
        model, path = model_from_config(FAMILIES[family]), root / family
        layout = make_layout(RunConfig(model).model, ParallelConfig())
        arrays = random_parameters(RunConfig(model), layout)
        write_weights(path, model, {f"params.{name}": x for name, x in arrays.items()}, dtype="BF16")
        known = {name: json.loads((path / CONFIG).read_text())[name] for name in ("architectures", "torch_dtype")}
        (path / CONFIG).write_text(json.dumps(known | FAMILIES[family] | {"eos_token_id": 0}))
        tokenizer.save(str(path / "tokenizer.json"))
        return path

    return folder


@pytest.fixture(scope="module")
def tokens(folder_of) -> Path:
    folder = folder_of("llama")
    out = folder.parent / "tokens"
    words = ["--data", folder.parent / "text.txt", "--out", out, "--tokenizer", folder, "--end-of-document", "</s>"]
    assert run(None, "prepare", *words)[0] == 0
    return out


def succeed(capfd, name: str, *words) -> str:
    code, out, err = run(capfd, name, *words)
    assert code == 0, out + err
    return out + err


def mesh_of(folder: Path) -> tuple[str, str]:
    return ("--mesh", "dp=2" if folder.name == "seven-heads" else "dp=2,tp=2")


def convert_both_ways(folder, tokens, out, capfd):
    succeed(capfd, "convert", "hf", folder, "--out", out / "ours", *mesh_of(folder))
    words = ["ours", out / "ours", "--out", out / "back", "--mesh", "dp=2"]
    succeed(capfd, "convert", *words)
    for path in (out / "back").iterdir():
        assert path.read_bytes() == (folder / path.name).read_bytes(), path.name
    trained(out / "ours", tokens, out, capfd, *mesh_of(folder))


def trained(folder, tokens, out, capfd, *more):
    """A run from the weights, exported and imported again. more: flags of the run."""
    mesh = () if "--mesh" in more else mesh_of(folder)
    words = ["--model", folder, "--weights", folder, "--data", tokens, "--out", out / "run", *STEPS, *mesh, *more]
    succeed(capfd, "train", *words)
    words = ["ours", out / "run", "--out", out / "export"]
    succeed(capfd, "convert", *words)
    kept = json.loads((out / "run" / "summary.json").read_text())["held_out_loss"]
    for path in (out / "run", out / "export"):
        how = ["--data", tokens, "--windows", "8", "--batch-size", "4", "--dtype", "float32"]
        said = succeed(capfd, "evaluate", path, *how)
        found = float(said.split(" nats")[0].split()[-1])
        # An export has the 16 bits of the files that the weights came from.
        assert found == pytest.approx(kept, rel=1e-5 if path.name == "run" else 1e-2)


def adapted(folder, tokens, out, capfd):
    trained(folder, tokens, out, capfd, "--lora", "2")


def generated(folder, tokens, out, capfd):
    how = ["--prompt", "w3 w4", "--temperature", "0", "--max-new-tokens", "3", "--dtype", "float32"]
    texts = [succeed(capfd, "generate", folder, *how, *mesh).splitlines()[0] for mesh in ([], mesh_of(folder))]
    assert texts[0] == texts[1] and texts[0].startswith("w3 w4")


def planned(folder, tokens, out, capfd):
    words = ["--model", folder, "--hardware", "h100", "--devices-per-node", "4", "--batch-size", "8"]
    assert "MFU" in succeed(capfd, "plan", *words)


def verified(folder, tokens, out, capfd):
    words = ["--model", folder, *mesh_of(folder), "--zero", "2", "--sp", "--batch-size", "4", "--device", "cpu"]
    succeed(capfd, "verify", *words)


PROGRAMS = {
    "convert": convert_both_ways,
    "weights": trained,
    "lora": adapted,
    "generate": generated,
    "plan": planned,
    "verify": verified,
}
SAMPLE = {("mixtral", "convert"), ("qwen3-moe", "lora"), ("llama", "weights"), ("gpt2", "generate")}


@pytest.mark.parametrize(
    ("family", "program"),
    [
        pytest.param(*cell, marks=() if cell in SAMPLE else pytest.mark.exhaustive, id="-".join(cell))
        for cell in ((family, program) for family in FAMILIES for program in PROGRAMS)
    ],
)
def test_a_family_goes_through_a_program(family, program, folder_of, tokens, tmp_path, capfd):
    PROGRAMS[program](folder_of(family), tokens, tmp_path, capfd)
