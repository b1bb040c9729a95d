"""The programs `generate` and `evaluate`, on a run that was just trained."""

import io
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DEVICES, in_sample
from support.programs import run

from experiments import evaluate, generate
from experiments.oracles import plain
from jaxdist.checkpoint.logical import PARAMS, named
from jaxdist.checkpoint.trained import find_weights
from jaxdist.errors import ConfigError
from jaxdist.models.declared import abstract_values
from jaxdist.models.presets import PRESETS

MODEL = ["--num-layers", "2", "--width", "32", "--num-heads", "4", "--seq-len", "24", "--vocab-size", "256"]
STEPS = ["--batch-size", "4", "--steps", "2", "--eval-windows", "8"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of bytes, and one of bare tokens."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("some words to learn from. " * 200)
    np.save(folder / "bare.npy", np.random.default_rng(0).integers(0, 256, 3000).astype(np.uint16))
    for out, data in (("bytes", "text.txt"), ("bare", "bare.npy")):
        words = [*MODEL, *STEPS, "--data", folder / data, "--out", folder / out, "--mesh", "dp=2"]
        assert run(None, "train", *words)[0] == 0
    return folder


def generated(words, capfd):
    return run(capfd, "generate", *words)


def test_one_prompt_is_streamed_and_nothing_else_is_printed(trained, capfd):
    texts = []
    for mesh in ("1", "tp=2", "pp=2", "cp=2"):
        code, out, err = generated([trained / "bytes", "--prompt", "some ", "--mesh", mesh], capfd)
        assert code == 0 and out.startswith("some ") and out.endswith("\n"), err
        assert "1 prompt of 5 tokens, 19 added" in err and "19 tokens are added to the longest" in err
        assert ("bytes for a token of every text" in err) == (mesh != "1")
        texts.append(out)
    assert len(set(texts)) == 1


def test_many_prompts_are_continued_some_at_a_time_with_the_tokens_they_have_together(
    trained, capfd, tmp_path, monkeypatch
):
    lines = [json.dumps({"prompt": "some words"[: 3 + number]}) for number in range(5)]
    (tmp_path / "p.jsonl").write_text("\ufeff" + "\n".join(lines))
    words = [trained / "bytes", "--prompts", tmp_path / "p.jsonl", "--temperature", "1", "--max-new-tokens", "6"]
    _, together, _ = generated(words, capfd)
    monkeypatch.setattr(generate, "TOGETHER", 2)
    code, apart, err = generated([*words, "--mesh", "dp=2"], capfd)
    assert code == 0 and apart == together and "5 prompts" in err
    (tmp_path / "p.jsonl").write_text('{"prompt": "half \\ud83d"}\n')
    code, _, err = generated(words, capfd)
    assert code == 2 and "line 1" in err


def test_perplexity_is_the_same_on_every_mesh(trained, capfd):
    found = []
    for words in (["1"], ["dp=2,tp=2"], ["pp=2"], ["dp=2", "--zero", "3"]):
        how = ["--data", trained / "text.txt", "--batch-size", "4", "--windows", "16", "--mesh", *words]
        code, out, err = run(capfd, "evaluate", trained / "bytes", *how)
        assert code == 0, err
        found.append(float(out.split("perplexity ")[1].split(":")[0].replace(",", "")))
    assert len(DEVICES) >= 4 and np.ptp(found) < 1e-3 * found[0]
    kept = json.loads((trained / "bytes" / "summary.json").read_text())
    assert abs(np.log(found[0]) - kept["held_out_loss"]) < 0.5  # over fewer windows


def plain_loss(params, shard, length, packed):
    """(nats, targets) of a shard of signed tokens by the oracle, a window (packed: a document of one) at a time."""
    nats = targets = 0
    for start in range(0, len(shard) - 1, length):
        signed = shard[start : start + length + 1]
        inputs, wanted = np.where(signed < 0, ~signed, signed)[:-1], np.array(signed[1:])
        ends = np.flatnonzero(inputs == 0) if packed else np.array([], int)
        wanted[ends] = -1
        for part in filter(len, np.split(np.arange(len(inputs)), ends + 1)):
            logits = np.asarray(plain.logits(params, {"inputs": inputs[part][None]}, None, plain.Dropout(0.0, [0])))[0]
            logits = logits[:, :256] - logits[:, :256].max(-1, keepdims=True)
            losses = np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(part)), wanted[part]]
            nats, targets = nats + losses[wanted[part] >= 0].sum(), targets + (wanted[part] >= 0).sum()
    return nats, targets


@pytest.mark.parametrize("packed", in_sample([False, True], [True]))
def test_a_held_out_loss_is_the_oracle_s_however_it_is_batched(tmp_path, capfd, packed):
    lines = [json.dumps({"prompt": f"{n}" + "p" * (37 * n % 80), "answer": f"a{n}"}) for n in range(120)]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    data, out, how = tmp_path / "data", tmp_path / "run", ["--mask-documents"] * packed
    words = ["--data", tmp_path / "chats.jsonl", "--out", data, "--tokenizer", "bytes", "--supervised"]
    assert run(capfd, "prepare", *words)[0] == 0
    words = [*MODEL[:6], "--seq-len", "8", "--vocab-size", "256", "--data", data, "--out", out, *how]
    assert run(capfd, "train", *words, "--steps", "1", "--eval-windows", "900")[0] == 0
    shard, weights = np.load(data / "held_out-00000.npy"), find_weights(str(out), "checkpoint")
    wanted = abstract_values(weights.model, "float32")
    one = jax.sharding.SingleDeviceSharding(DEVICES[0])
    like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one) for name, x in named(PARAMS, wanted).items()}
    with jax.enable_x64(True):
        params = {n.removeprefix("params."): np.asarray(x, np.float64) for n, x in weights.read(like).items()}
        nats, targets = plain_loss(params, shard, 8, packed)
    windows = [shard[start : start + 9] for start in range(0, len(shard) - 1, 8)]
    assert any((window[1:] < 0).all() for window in windows) and targets < len(shard) / 4
    assert json.loads((out / "summary.json").read_text())["held_out_loss"] == pytest.approx(nats / targets, rel=1e-6)
    for batch_size in (1, 7, 64):
        words = [out, "--data", data, "--batch-size", batch_size, "--windows", "900"]
        code, said, err = run(capfd, "evaluate", *words)
        assert code == 0 and f"over {targets} tokens" in said, (said, err)
        assert float(said.split(" nats")[0].split()[-1]) == pytest.approx(nats / targets, rel=1e-6)


@pytest.fixture
def evaluated(monkeypatch, tmp_path, capfd):
    """Evaluates with a stub that answers what it is told; returns the batches it was given, and what is printed."""
    (tmp_path / "text.txt").write_text("some words to learn from. " * 200)
    kept = {"companions": tmp_path, "data": {"tokenizer": "bytes"}}
    weights = types.SimpleNamespace(
        model=PRESETS["proof"], dtype="float32", about="", mask_documents=False, trained_in=None, **kept
    )
    weights.read = lambda wanted: None
    monkeypatch.setattr(evaluate, "find_weights", lambda *_, **__: weights)
    monkeypatch.setattr(evaluate, "abstract_parameters", lambda *_: None)
    monkeypatch.setattr(evaluate, "parameters_from_logical", lambda *_: None)

    def call(*words, answers):
        batches, answers = [], iter(answers)
        program = types.SimpleNamespace(layout=None, mesh=None, put=batches.append, evaluate=lambda *_: next(answers))
        monkeypatch.setattr(evaluate, "build_program", lambda *_: program)
        how = ["--data", tmp_path / "text.txt", "--batch-size", "4", *words]
        code, out, err = run(capfd, "evaluate", "", *how)
        assert code == 0, err
        return batches, out

    return call


def test_every_token_has_the_same_weight_in_the_mean(evaluated):
    _, out = evaluated("--windows", "8", answers=[(2.0, 4), (3.0, 1)])
    assert "1.000000 nats a token over 5 tokens" in out


def test_batches_of_the_training_data_differ(evaluated):
    (first, second), _ = evaluated("--split", "train", "--windows", "8", answers=[(1.0, 1)] * 2)
    assert not np.array_equal(first["inputs"], second["inputs"])


def test_a_rotary_model_is_not_evaluated_beyond_the_positions_it_was_trained_for():
    model = PRESETS["llama-proof"]
    assert evaluate.with_seq_len(model, model.seq_len // 2).seq_len == model.seq_len // 2
    with pytest.raises(ConfigError, match="positions"):
        evaluate.with_seq_len(model, model.seq_len + 1)


def test_several_prompts_of_a_file_are_continued_together(trained, capfd, tmp_path, monkeypatch):
    (tmp_path / "p.jsonl").write_text('{"prompt": "two\\nlines"}\n{"prompt": "b"}\n{"prompt": "words"}\n')
    words = [trained / "bytes", "--prompts", tmp_path / "p.jsonl", "--max-new-tokens", "3", "--mesh", "dp=2"]
    drawn = ["--temperature", "1", "--top-k", "50", "--seed", "7"]
    code, out, err = generated([*words, *drawn], capfd)
    assert code == 0 and "3 prompts of 15 tokens" in err
    assert [text in out for text in ("two\nlines", "\n\nb", "words")] == [True] * 3
    assert generated([*words[:-1], "tp=2", *drawn], capfd)[1] == out
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nb\n"))
    code, out, _ = generated([trained / "bytes", "--prompts", "-", "--max-new-tokens", "1"], capfd)
    assert code == 0 and out.startswith("two")


def test_line_ends_and_marks_of_windows_are_no_part_of_a_prompt(tmp_path):
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbfdef main(\r\n\r\nimport os\r\n")
    assert generate.read_prompts(str(tmp_path / "p.txt")) == ["def main(", "import os"]


@pytest.mark.parametrize("mesh", ["1", "cp=2"])
def test_a_text_is_as_long_with_a_longer_one_beside_it(trained, capfd, tmp_path, mesh):
    """The model has 24 positions: 18 tokens are added to a prompt of 6, and 3 to one of 21."""
    words = [trained / "bytes", "--max-new-tokens", "18", "--mesh", mesh]
    _, alone, _ = generated([*words, "--prompt", "some w"], capfd)
    (tmp_path / "p.txt").write_text("some w\n" + "some words to learn fr\n"[1:])
    code, out, err = generated([*words, "--prompts", tmp_path / "p.txt"], capfd)
    assert code == 0 and "3 tokens are added to the longest prompt" in err and "21 added" in err
    assert out.startswith(alone)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["bytes"], "no prompt"),
        (["bytes", "--prompt", ""], "Write at least a word"),
        (["bytes", "--prompt", "caf\udce9"], "UTF-8"),
        (["bytes", "--prompt", "x" * 24], "Shorten it to 23 tokens"),
        (["bytes", "--prompt", "a", "--top-p", "0.5"], "nothing is drawn"),
        (["bytes", "--prompt", "a", "--mesh", "tp=3"], "num_heads=4"),
        (["bytes", "--prompt", "a", "--mesh", "cp=8", "--cp-kind", "ulysses"], "Use --cp-kind ring"),
        (["bytes:7", "--prompt", "a"], "it holds those of steps 2"),
        (["nowhere", "--prompt", "a"], "no such checkpoint"),
        (["bare", "--prompt", "a"], "what its tokens mean"),
        (["bytes", "--prompts", "missing.txt"], "missing.txt"),
        (["bytes", "--prompts", "bad.jsonl"], "line 3"),
        (["bytes", "--prompts", "empty.txt"], "empty.txt"),
        (["bytes", "--prompt", "a", "--seed", "3"], "nothing is drawn"),
        (["bytes", "--prompt", "a", "--temperature", "1e-30"], "--temperature"),
        (["bytes", "--prompt", "a", "--max-new-tokens", "0"], "max-new-tokens"),
    ],
)
def test_what_cannot_be_continued_is_refused(trained, capfd, monkeypatch, words, match):
    monkeypatch.chdir(trained)
    (trained / "bad.jsonl").write_text('{"prompt": "a"}\n\n{"text": "a"}\n')
    (trained / "empty.txt").write_text("\n")
    code, out, err = generated(words, capfd)
    assert code == 2 and match in err and not out


def test_bare_tokens_need_a_named_tokenizer(trained, capfd):
    words = [trained / "bare", "--prompt", "a", "--tokenizer", "bytes", "--max-new-tokens", "2", "--stop", "zzz"]
    assert generated(words, capfd)[0] == 0


def test_documents_in_float64_are_evaluated_and_continued_as_they_were_trained(tmp_path, capfd, monkeypatch):
    data, out, dtypes = tmp_path / "data", tmp_path / "run", set()
    (tmp_path / "docs.jsonl").write_text("\n".join(json.dumps({"text": f"{number:07}"}) for number in range(400)))
    words = ["--data", tmp_path / "docs.jsonl", "--out", data, "--tokenizer", "bytes"]
    assert run(capfd, "prepare", *words)[0] == 0
    words = [*MODEL[:-1], "257", "--data", data, "--out", out, "--mask-documents", "--dtype", "float64"]
    words += ["--batch-size", "4", "--steps", "20", "--eval-windows", "8"]
    monkeypatch.setattr(
        generate, "generate", lambda programs, *_: dtypes.update(x.dtype for x in jax.tree.leaves(programs.params))
    )
    monkeypatch.setattr(generate, "report", lambda *_: None)
    try:
        assert run(capfd, "train", *words)[0] == 0
        how, found = [out, "--data", data, "--batch-size", "4", "--windows", "8"], []
        for masks in ("auto", "no"):
            words = [*how, "--mask-documents", masks]
            code, said, err = run(capfd, "evaluate", *words)
            assert code == 0 and ("each document by itself" in said) == (masks == "auto"), err
            found.append(float(said.split(" nats")[0].split()[-1]))
        np.save(tmp_path / "bare.npy", np.zeros(3000, np.uint16))
        words = [out, "--data", tmp_path / "bare.npy"]
        code, _, err = run(capfd, "evaluate", *words)
        assert code == 2 and "or --mask-documents no" in err
        assert generated([out, "--prompt", "00"], capfd)[0] == 0
    finally:
        jax.config.update("jax_enable_x64", False)
    kept = json.loads((out / "summary.json").read_text())["held_out_loss"]
    assert abs(found[0] - kept) < 1e-6 < 1e-3 < abs(found[1] - kept)
    assert dtypes == {jnp.dtype("float64")}


@pytest.mark.parametrize(
    ("words", "match"),
    [(["--seq-len", "12"], "positions"), (["--windows", "0"], "windows"), (["--mesh", "dp=3"], "batch")],
)
def test_what_cannot_be_evaluated_is_refused(trained, capfd, words, match):
    how = [trained / "bytes", "--data", trained / "text.txt", "--batch-size", "4", *words]
    code, _, err = run(capfd, "evaluate", *how)
    assert code == 2 and match in err
