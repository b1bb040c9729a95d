"""`convert` and `train --weights`: there and back to the bit, through any mesh, and what does not fit in one table."""

import dataclasses
import errno
import importlib.util
import io
import json
import math
import os
import shutil
import sys
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DEVICES
from rich.console import Console
from support import programs

import experiments.convert
from experiments.convert import Hf, prove
from jaxdist.checkpoint import safetensors, weights
from jaxdist.checkpoint.checkpoints import Checkpoints
from jaxdist.checkpoint.logical import abstract_parameters, fetch
from jaxdist.checkpoint.safetensors import Stored
from jaxdist.checkpoint.trained import GENERATION, Weights, compare_tokens, find_weights
from jaxdist.checkpoint.weights import in_our_names, open_weights, read_weights, stored_dtypes, write_weights
from jaxdist.config import RunConfig
from jaxdist.data.prepared import TOKENIZER as TOKENIZER_FILE
from jaxdist.data.tokenizer import BPETokenizer, with_template
from jaxdist.errors import ConfigError
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.models.huggingface import CONFIG, tensors_of
from jaxdist.models.presets import PRESETS
from jaxdist.parity import random_parameters
from jaxdist.placement import make_layout
from jaxdist.strategy import ParallelConfig

tokenizers = pytest.importorskip("tokenizers", reason="pip install -e '.[data]'")
MODEL = dataclasses.replace(PRESETS["llama-proof"], seq_len=16)
TOKENIZER = b'{"any": "file"}'


def run(capsys, name: str, *words) -> tuple[int, str]:
    code, *said = programs.run(capsys, name, *words)
    return code, "".join(said)


def convert(capsys, *words) -> str:
    code, said = run(capsys, "convert", *words)
    assert code == 0, said
    return said


def train(capsys, *words) -> tuple[int, str]:
    words += () if "--lr" in words else ("--lr", 3e-3)
    return run(capsys, "train", *words, "--batch-size", 8, "--warmup-steps", 1, "--device", "cpu")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Path:
    """A folder of transformers, in bf16."""
    folder = tmp_path_factory.mktemp("theirs") / "model"
    config = RunConfig(MODEL)
    arrays = random_parameters(config, make_layout(MODEL, ParallelConfig()))
    write_weights(folder, MODEL, {f"params.{name}": x for name, x in arrays.items()}, dtype="BF16")
    (folder / "tokenizer.json").write_bytes(TOKENIZER)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "tokens.npy"
    np.save(path, np.random.default_rng(0).integers(0, 250, 4000).astype(np.uint16))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_there_and_back_to_the_byte(theirs, tmp_path, capsys):
    said = convert(capsys, "hf", theirs, "--out", tmp_path / "ours", "--mesh", "dp=2,tp=2")
    assert "gradients compared with transformers" in said or "not proved" in said
    steps = Checkpoints(tmp_path / "ours")
    assert steps.steps() == [0] and {dtype for dtype, _ in steps.manifest(0).arrays.values()} == {"bfloat16"}
    convert(capsys, "ours", tmp_path / "ours", "--out", tmp_path / "again", "--mesh", "pp=2")
    assert contents(tmp_path / "again") == contents(theirs) and contents(theirs)["tokenizer.json"] == TOKENIZER


def test_an_import_proves_itself(theirs, tmp_path, capsys, monkeypatch):
    pytest.importorskip("torch", reason="pip install -e '.[oracle]'")
    pytest.importorskip("transformers", reason="pip install -e '.[oracle]'")
    assert "logits, loss and 39 gradients compared" in convert(capsys, "hf", theirs, "--out", tmp_path / "a")
    monkeypatch.setattr(experiments.convert, "PROVED_BYTES", 10)
    assert "not proved: 0.0 GB" in convert(capsys, "hf", theirs, "--out", tmp_path / "b")
    (tmp_path / "a" / "metrics.jsonl").write_text("")  # as a run has
    shutil.rmtree(next(path for path in (tmp_path / "a").iterdir() if path.is_dir()))
    assert run(capsys, "convert", "hf", theirs, "--out", tmp_path / "a")[0] == 2
    wrong = experiments.convert.read_weights

    def flipped(*args):
        return {name: x if "w_k" not in name else x[:, :, ::-1] for name, x in wrong(*args).items()}

    monkeypatch.setattr(experiments.convert, "read_weights", flipped)
    code, said = run(capsys, "convert", "hf", theirs, "--out", tmp_path / "c", "--prove")
    assert code == 1 and "not converted" in said and not Checkpoints(tmp_path / "c").steps()


def test_a_gradient_that_is_noise_fails_no_proof(tmp_path):
    """A layer whose projections are zeros passes everything on, and what is before them has no gradient."""
    pytest.importorskip("torch", reason="pip install -e '.[oracle]'")
    pytest.importorskip("transformers", reason="pip install -e '.[oracle]'")
    arrays = random_parameters(RunConfig(MODEL), make_layout(MODEL, ParallelConfig()))
    for name in ("blocks.attention.w_out", "blocks.mlp.w_down"):
        arrays[name][1] = 0
    folder = tmp_path / "in"
    write_weights(folder, MODEL, {f"params.{name}": x for name, x in arrays.items()})
    devices = SimpleNamespace(devices=DEVICES)
    assert not prove(Hf(path=str(folder), out="out"), MODEL, ParallelConfig(), devices).failed
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"pad_token_id": "x"}))  # which we have no use for
    found = prove(Hf(path=str(folder), out="out"), MODEL, ParallelConfig(), devices)
    assert not found.failed and "transformers does not read the folder" in found.text


def test_a_config_says_a_name_twice_and_a_longer_sequence_than_its_source(theirs, tmp_path, capsys):
    shutil.copytree(theirs, tmp_path / "in")
    text = (tmp_path / "in/config.json").read_text().rstrip().removesuffix("}")
    twice = f'{text}, "hidden_size": {MODEL.width}}}'
    (tmp_path / "in/config.json").write_text(twice)
    convert(capsys, "hf", tmp_path / "in", "--out", tmp_path / "ours")
    convert(capsys, "ours", tmp_path / "ours", "--out", tmp_path / "out")
    assert (tmp_path / "out/config.json").read_text() == twice
    longer, source = dataclasses.replace(MODEL, seq_len=99), weights.source_of(open_weights(theirs, MODEL)[0])
    assert json.loads(weights.config_text(longer, source))["max_position_embeddings"] == 99


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.safetensors"])
def test_weights_in_other_files_are_refused_by_name(tmp_path, capsys, name):
    (tmp_path / name).touch()
    code, said = run(capsys, "generate", tmp_path, "--prompt", "a")
    assert code == 2 and f"has {name}" in said
    code, said = run(capsys, "generate", tmp_path / name, "--prompt", "a")
    assert code == 2 and "Name a folder" in said and "Remove" not in said


def test_a_proof_fails_where_one_gradient_is_not_a_number(theirs, monkeypatch):
    gradients = {tensor.name: np.zeros(tensor.shape) for tensor in tensors_of(MODEL)}
    oracle = SimpleNamespace(logits=lambda tokens: None, gradients=lambda batch: (1.0, gradients))
    causal_lm = SimpleNamespace(load=lambda *_: oracle)
    seen = SimpleNamespace(losses=[1.0], gradients=[in_our_names(MODEL, gradients)])
    gaps = chain([0.0, math.nan], repeat(0.0))  # the logits', the first gradient's, those of all others
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "experiments.oracles.huggingface", SimpleNamespace(CausalLM=causal_lm))
    monkeypatch.setattr(experiments.convert, "forward_logits", lambda *_: None)
    monkeypatch.setattr(experiments.convert, "observe", lambda *_: seen)
    monkeypatch.setattr(experiments.convert, "gap", lambda *_: next(gaps))
    proof = prove(Hf(path=str(theirs), out="out"), MODEL, ParallelConfig(), SimpleNamespace(devices=DEVICES))
    assert proof.failed and "the largest difference is nan" in proof.text


def test_what_is_there_is_not_overwritten(theirs, tmp_path, capsys):
    convert(capsys, "hf", theirs, "--out", tmp_path / "ours")
    for words, said in (
        (("hf", theirs, "--out", tmp_path / "ours"), "checkpoint"),
        (("ours", tmp_path / "ours", "--out", theirs), "Choose another folder"),
        (("ours", tmp_path / "none", "--out", tmp_path / "x"), "there is no such checkpoint"),
        (("hf", tmp_path / "none", "--out", tmp_path / "x"), "no file or folder of that name"),
        (("hf", tmp_path, "--out", tmp_path / "x"), "config.json': there is no file or folder of that name"),
    ):
        code, text = run(capsys, "convert", *words)
        assert code == 2 and said in " ".join(text.split())


def test_a_folder_has_all_that_goes_with_it_before_it_has_its_name(theirs, tmp_path, capsys, monkeypatch):
    """Killed at any write, `convert` leaves nothing that passes for whole, and run again it completes it."""
    ours, back = ("hf", theirs, "--out", tmp_path / "ours"), ("ours", tmp_path / "ours", "--out", tmp_path / "back")

    class Killed(BaseException):
        pass

    def killed(holder, *_):
        folder = getattr(holder, "folder", holder)
        assert not folder.is_dir() or {CONFIG, "tokenizer.json"} <= contents(folder).keys()
        raise Killed

    for words, where, name in (
        (ours, weights, "write_whole"),
        (ours, Checkpoints, "save"),
        (back, weights, "write_whole"),
        (back, Path, "rename"),
    ):
        with monkeypatch.context() as patched, pytest.raises(Killed):
            patched.setattr(where, name, killed)
            run(capsys, "convert", *words)
        assert not Checkpoints(tmp_path / "ours").steps() if words == ours else not [*tmp_path.glob("back*")]
        if where is not weights:
            convert(capsys, *words)
    assert contents(tmp_path / "back") == contents(theirs)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_export_in_another_dtype(theirs, tmp_path, capsys, dtype):
    convert(capsys, "hf", theirs, "--out", tmp_path / "ours")
    convert(capsys, "ours", tmp_path / "ours", "--out", tmp_path / "out", "--dtype", dtype)
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert config["torch_dtype"] == dtype
    stored = open_weights(tmp_path / "out", MODEL)[1]
    assert {s.map().dtype.name for s in stored.values()} == {dtype}


# ---- training from weights ----


@pytest.mark.parametrize("mesh", [pytest.param("dp=2,tp=2", marks=pytest.mark.exhaustive), "pp=2"])
def test_a_run_starts_from_weights_and_resumes_from_its_own(theirs, data, tmp_path, capsys, mesh):
    common = ("--model", theirs, "--data", data, "--steps", 4, "--mesh", mesh)
    weights = tmp_path / "weights"
    convert(capsys, "hf", theirs, "--out", weights)
    code, whole = train(capsys, *common, "--weights", theirs, "--out", tmp_path / "a")
    assert code == 0 and "started from the weights in" in whole
    code, said = train(capsys, *common, "--weights", weights, "--out", tmp_path / "b", "--drill", "term:step=3")
    assert code == 143 and "started from the parameters of step 0" in said
    (weights / "step_00000000/manifest.json").unlink()  # its own checkpoint is enough from here on
    code, said = train(capsys, *common, "--weights", weights, "--out", tmp_path / "b")
    assert code == 0 and "resumed after" in said
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in "ab"
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    assert json.loads((tmp_path / "a/config.json").read_text())["weights"] == str(theirs)
    convert(capsys, "ours", tmp_path / "b", "--out", tmp_path / "out")
    assert contents(tmp_path / "out")["tokenizer.json"] == TOKENIZER
    assert contents(tmp_path / "out")[CONFIG] == contents(theirs)[CONFIG]
    assert open_weights(tmp_path / "out", MODEL)[0].headers == open_weights(theirs, MODEL)[0].headers


def test_the_first_loss_is_that_of_the_weights(theirs, data, capsys):
    """Not of the initial values, whose loss is the logarithm of the vocabulary's size."""
    code, said = train(capsys, "--model", theirs, "--data", data, "--steps", 1, "--weights", theirs, "--seq-len", 8)
    first = float(said.split("held-out loss ")[1].split()[0])
    assert code == 0 and first > np.log(250) + 0.05


@pytest.mark.parametrize(
    "words, said",
    [
        (("--model", "llama-proof", "--num-layers", "2"), "different  num_layers: 4; the model has 2"),
        (("--model", "llama-proof", "--restore", "x"), "--weights with --restore"),
    ],
)
@pytest.mark.parametrize("kind", ["hf", "ours"])
def test_other_weights_are_refused_with_a_table(theirs, data, tmp_path, capsys, words, said, kind):
    if kind == "ours":
        convert(capsys, "hf", theirs, "--out", tmp_path / "ours")
    weights = theirs if kind == "hf" else tmp_path / "ours"
    code, text = train(capsys, *words, "--weights", weights, "--data", data, "--steps", 1)
    assert code == 2 and said in text and "defect" not in text


def test_an_export_stops_and_begins_as_its_run_does(theirs, tmp_path, capsys):
    """Fine-tuned with another end of document than its source's, and with <s> before each."""
    inner = tokenizers.Tokenizer.from_str(BPETokenizer.train(iter(["a few words"] * 9), 257).to_bytes().decode())
    described = json.loads(inner.to_str())
    described["model"]["vocab"] = {name: n for name, n in described["model"]["vocab"].items() if n < 240}
    described["model"]["merges"] = []
    inner = tokenizers.Tokenizer.from_str(json.dumps(described))
    inner.add_special_tokens(["<s>", "</s>"])
    folder = tmp_path / "theirs"
    folder.mkdir()
    for name, content in contents(theirs).items():
        (folder / name).write_bytes(content)
    (folder / GENERATION).write_text('{"eos_token_id": 3, "do_sample": true}')
    (folder / "tokenizer.json").write_text(inner.to_str())
    (tmp_path / "text.txt").write_text("a few words " * 900)
    begins = with_template(inner.to_str().encode(), ("<s>",))
    (tmp_path / "begins.json").write_bytes(begins)
    words = ["--data", tmp_path / "text.txt", "--out", tmp_path / "data", "--end-of-document", "</s>"]
    code, said = run(capsys, "prepare", *words, "--tokenizer", tmp_path / "begins.json")
    assert code == 0 and "<s> before it and </s> after it" in said, said
    words = ("--model", folder, "--weights", folder, "--data", tmp_path / "data", "--out", tmp_path / "run")
    code, said = train(capsys, *words, "--steps", 1)
    assert code == 0, said
    convert(capsys, "ours", tmp_path / "run", "--out", tmp_path / "out")
    ours, theirs_now = (find_weights(str(tmp_path / name), "path") for name in ("run", "out"))
    tokenizer = ours.tokenizer()
    end, begin = tokenizer._inner.token_to_id("</s>"), tokenizer._inner.token_to_id("<s>")
    assert ours.end_of_text() == (end, 3) and set(theirs_now.end_of_text()) == {end, 3}
    assert ours.begin_of_text(tokenizer) == (begin,) == theirs_now.begin_of_text(theirs_now.tokenizer())
    settings = json.loads((tmp_path / "out" / GENERATION).read_text())
    assert settings == {"eos_token_id": [end, 3], "do_sample": True, "bos_token_id": begin}
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert config["eos_token_id"] == [end, 3] and config["bos_token_id"] == begin
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[oracle]'")
    found = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "out"))
    assert found("a few").input_ids == [begin, *tokenizer.encode(["a few"])[0]] and found.eos_token == "</s>"


def test_weights_that_overflow_in_the_dtype_asked_for_are_said():
    console = Console(record=True, file=io.StringIO())
    for dtype in (None, "bfloat16", "float16"):
        experiments.convert.say_not_finite({"params.w": jnp.array([1e5])}, console, dtype)
        assert ("not finite: params.w" in console.export_text()) == (dtype == "float16")


def test_weights_that_are_not_finite_are_said_and_go_no_further(theirs, data, tmp_path, capsys):
    arrays = random_parameters(RunConfig(MODEL), make_layout(MODEL, ParallelConfig()))
    arrays["norm.scale"][0] = np.nan
    write_weights(tmp_path / "bad", MODEL, {f"params.{name}": x for name, x in arrays.items()})
    code, said = run(capsys, "convert", "hf", tmp_path / "bad", "--out", tmp_path / "ours")
    assert code == 0 and "not finite: params.norm.scale" in said and "not proved" in said
    words = [tmp_path / "bad", "--data", data, "--windows", 8]
    assert run(capsys, "evaluate", *words)[0] == 1
    words = [tmp_path / "bad", "--prompt", "a", "--tokenizer", "bytes"]
    code, said = run(capsys, "generate", *words)
    assert code == 1 and "not finite" in said


def test_a_published_mixture_is_tuned_with_losses_of_one_s_own(tmp_path, data):
    model = dataclasses.replace(PRESETS["moe-proof"], balance_loss=0.0, z_loss=0.0)
    tuned = dataclasses.replace(model, balance_loss=0.01, z_loss=1e-3, capacity=1.5)
    assert not weights.model_differences(model, tuned)
    assert weights.model_differences(model, dataclasses.replace(model, top_k=1))


def test_parameters_alone_are_not_restored_as_a_run(theirs, data, tmp_path, capsys):
    convert(capsys, "hf", theirs, "--out", tmp_path / "ours")
    code, text = train(capsys, "--model", theirs, "--restore", tmp_path / "ours", "--data", data, "--steps", 1)
    assert code == 2 and "Use --weights" in " ".join(text.split())


def test_a_process_reads_the_bytes_of_its_shards_alone(theirs, monkeypatch):
    """Each device's callback copies half of a matrix over tp=2; nothing else in memory is touched."""
    copied = []
    whole = weights._read_part

    def counted(tensors, places, like, index):
        found = whole(tensors, places, like, index)
        copied.append(found.nbytes)
        return found

    monkeypatch.setattr(weights, "_read_part", counted)
    layout = make_layout(MODEL, ParallelConfig(parse_mesh("tp=2")))
    wanted = abstract_parameters(layout, make_mesh(parse_mesh("tp=2"), DEVICES), "float32")
    name = "params.blocks.mlp.w_up"
    [array] = read_weights(theirs, MODEL, {name: wanted[name]}).values()
    assert copied == [array.nbytes // 2] * 2
    one = jax.sharding.SingleDeviceSharding(DEVICES[0])
    alone = read_weights(theirs, MODEL, {name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=one)})
    assert np.array_equal(fetch(array), alone[name])


def test_a_parameter_of_two_dtypes_is_kept_in_the_one_that_holds_both(theirs):
    _, places = open_weights(theirs, MODEL)
    first = "model.layers.0.mlp.up_proj.weight"
    for dtype in ("F32", "F16"):  # no 16 bits hold both kinds of 16
        found = stored_dtypes({**places, first: dataclasses.replace(places[first], dtype=dtype)}, MODEL)
        assert found["params.blocks.mlp.w_up"] == np.float32 and found["params.blocks.mlp.w_down"] == jnp.bfloat16


def test_a_tied_head_is_compared_with_its_table_to_the_last_row(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "COMPARED_ROWS", 4)
    for name, last in (("table", 0), ("head", 1)):
        np.array([0] * 11 + [last], np.float32).tofile(tmp_path / name)
    head, table = (Stored(tmp_path / name, "F32", (6, 2), 0) for name in ("head", "table"))
    weights._require_same(tmp_path, table, table)
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        weights._require_same(tmp_path, head, table)


def weights_with(companions: Path, **data) -> Weights:
    return Weights(MODEL, "", {}, read=dict, source=None, companions=companions, data=data)


def test_only_weights_of_others_put_tokens_before_a_text(tmp_path):
    tokenizer = BPETokenizer.train(iter(["text"]), 257)
    tokenizer.begin_of_text = (1,)
    assert weights_with(tmp_path).begin_of_text(tokenizer) == (1,)
    assert weights_with(tmp_path, tokenizer=None, end_of_document=None).begin_of_text(tokenizer) == (1,)
    assert weights_with(tmp_path, tokenizer="bytes", end_of_document=5).begin_of_text(tokenizer) == ()
    assert weights_with(tmp_path, tokenizer="a hash", begin_of_text=[4]).begin_of_text(tokenizer) == (4,)


def test_a_text_ends_with_any_token_that_a_run_or_a_file_names(tmp_path):
    (tmp_path / GENERATION).write_text('{"eos_token_id": [7, 9]}')
    assert weights_with(tmp_path).end_of_text() == (7, 9)
    assert weights_with(tmp_path, end_of_document=5).end_of_text() == (5, 7, 9)
    (tmp_path / GENERATION).write_text('{"eos_token_id": [7, null]}')
    assert weights_with(tmp_path).end_of_text() == (7,)
    (tmp_path / GENERATION).write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ConfigError, match=r"eos_token_id .*</s>.* must be a token's number"):
        weights_with(tmp_path).end_of_text()


def test_tokens_mean_what_the_files_beside_them_say(tmp_path):
    bare, of_bytes = (SimpleNamespace(tokenizer=name, tokenizer_file=None, about="it") for name in (None, "bytes"))
    for source, said, same in ((bare, {"tokenizer": "bytes"}, None), (of_bytes, {}, None)):
        assert compare_tokens(tmp_path, said, source).same is same
    for name, same in (("bytes", True), ("a hash", False)):
        assert compare_tokens(tmp_path, {"tokenizer": name}, of_bytes).same is same
    assert weights_with(tmp_path).tokenizer() is None
    trained = BPETokenizer.train(iter(["text"]), 257)
    (tmp_path / TOKENIZER_FILE).write_bytes(trained.to_bytes())
    assert weights_with(tmp_path).tokenizer().identity == trained.identity


def test_an_export_of_several_files_has_an_index_and_is_read_to_the_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "MAX_FILE_BYTES", 100_000)
    model = dataclasses.replace(PRESETS["moe-proof"], num_experts=2, top_k=1)
    config = RunConfig(model)
    arrays = random_parameters(config, make_layout(model, ParallelConfig()))
    arrays = {f"params.{name}": np.asarray(x) for name, x in arrays.items()}
    write_weights(tmp_path / "out", model, arrays)
    assert len([*(tmp_path / "out").glob("*.safetensors")]) > 1 and (tmp_path / "out" / safetensors.INDEX).exists()
    _, places = open_weights(tmp_path / "out", model)
    found = in_our_names(model, {name: place.map("r") for name, place in places.items()})
    for name, x in found.items():
        path, _, layer = name.partition("[")
        ours = arrays[f"params.{path}"]
        np.testing.assert_array_equal(x, ours[int(layer[:-1])] if layer else ours[: len(x)], err_msg=name)


def test_an_index_without_metadata_is_read_and_not_written_again(theirs, tmp_path, capsys):
    source = weights.source_of(open_weights(theirs, MODEL)[0])
    [header] = source.headers.values()
    index = json.dumps({"weight_map": dict.fromkeys(weights._tensors(header), "model.safetensors")})
    shutil.copytree(theirs, tmp_path / "bare")
    (tmp_path / "bare/model.safetensors.index.json").write_text(index)
    assert "not proved" in convert(capsys, "hf", tmp_path / "bare", "--out", tmp_path / "ours")
    convert(capsys, "ours", tmp_path / "ours", "--out", tmp_path / "again")
    written = contents(tmp_path / "again")
    assert "metadata" in json.loads(written.get("model.safetensors.index.json", b'{"metadata": {}}'))


def test_an_export_reserves_its_room_first(theirs, tmp_path, capsys, monkeypatch):
    """Mapped memory that a full disk cannot hold is a SIGBUS."""
    [header] = open_weights(theirs, MODEL)[0].headers.values()
    safetensors.allocate(tmp_path / "file", header)
    found = (tmp_path / "file").stat()
    assert found.st_blocks * 512 >= found.st_size == (theirs / "model.safetensors").stat().st_size
    convert(capsys, "hf", theirs, "--out", tmp_path / "ours")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    words = ("ours", tmp_path / "ours", "--out", tmp_path / "back")
    code, said = run(capsys, "convert", *words)
    assert code == 2 and "No space left" in said and said.count("\n") == 1 and not [*tmp_path.glob("back*")]


def test_a_fine_tune_needs_a_rate_and_its_own_tokenizer_and_says_its_precision(theirs, data, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("some words to learn from. " * 200)
    (tmp_path / "theirs").mkdir()
    for name, content in contents(theirs).items():
        (tmp_path / "theirs" / name).write_bytes(content)
    (tmp_path / "theirs" / "tokenizer.json").write_bytes(BPETokenizer.train(iter(["some words"]), 257).to_bytes())
    common = ("--model", tmp_path / "theirs", "--steps", 1)
    words = (*common, "--weights", tmp_path / "theirs")
    code, said = run(capsys, "train", *words, "--data", data)
    assert code == 2 and "--lr 2e-05" in said
    code, said = run(capsys, "train", *words, "--data", data, "--lora", 2)
    assert code == 2 and "--lr 0.0002" in said
    code, said = train(capsys, *words, "--data", tmp_path / "text.txt")
    assert code == 2 and "--tokenizer" in said and "prepare" in said
    code, said = train(capsys, *words, "--data", data)
    assert code == 0 and "bare tokens" in said and "the weights are bfloat16" in said
    code, said = train(capsys, *common, "--data", tmp_path / "text.txt", "--num-layers", 1)
    assert code == 0 and "note: the model's tokens are of" in said  # a new model of theirs shape may read bytes
    words = [tmp_path / "theirs", "--data", tmp_path / "text.txt"]
    code, said = run(capsys, "evaluate", *words)
    assert code == 2 and "--tokenizer" in said


def test_an_export_of_a_run_of_ours_says_its_dtype_and_its_tokens(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("some words to learn from. " * 300)
    words = ["--data", tmp_path / "text.txt", "--out", tmp_path / "data", "--vocab-size", 257]
    assert run(capsys, "prepare", *words)[0] == 0
    words = ("--model", "llama-proof", "--vocab-size", 257, "--data", tmp_path / "data", "--out", tmp_path / "run")
    code, said = train(capsys, *words, "--steps", 1, "--dtype", "bfloat16", "--seq-len", 8)  # with fp32 masters
    assert code == 0, said
    convert(capsys, "ours", tmp_path / "run", "--out", tmp_path / "out")
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert config["torch_dtype"] == "float32" and config["eos_token_id"] == 0 and config["vocab_size"] == 257
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[oracle]'")
    found = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "out"))
    assert found.eos_token == "<|endoftext|>" and len(found) == 257


def test_two_sets_of_weights_in_one_folder_are_refused(theirs, tmp_path):
    for name, content in contents(theirs).items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / safetensors.INDEX).write_text('{"weight_map": {"a": "other.safetensors"}}')
    with pytest.raises(ConfigError, match=safetensors.INDEX):
        open_weights(tmp_path, MODEL)
