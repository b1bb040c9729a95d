"""Documents packed into one sequence, told apart: each is trained on as if it were alone."""

import dataclasses
import json
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DEVICES
from support.small_models import MODELS

import jaxdist
from experiments.entry import run_program
from experiments.prepare import PrepareFlags, main
from jaxdist.data.batches import Batches, Corpus, Source, document_starts, held_out_batches, load_corpus
from jaxdist.data.tokens import targets_of, tokens_in, unmasked
from jaxdist.errors import ConfigError
from jaxdist.mesh import make_abstract_mesh, parse_mesh
from jaxdist.models.context import Context
from jaxdist.parity import observe
from jaxdist.train.program import build_program
from jaxdist.verification import proof_config

LENGTHS = (7, 1, 20, 12)  # of the documents of a sequence, 40 together


@pytest.mark.parametrize("name", ["gpt2", "windows", pytest.param("experts", marks=pytest.mark.exhaustive)])
def test_a_packed_sequence_equals_its_documents_alone(name):
    """In float64: the loss and every gradient. A router's load alone differs: the padding is routed and counted too."""
    model = MODELS[name]
    rng = np.random.default_rng(0)
    text = rng.integers(0, model.vocab_size, model.seq_len + 1).astype(np.int32)
    ends = np.cumsum(LENGTHS)
    packed = {"inputs": text[None, :-1], "targets": text[None, 1:].copy(), "rows": np.arange(1, dtype=np.int32)}
    packed["targets"][0, ends - 1] = -1
    packed["starts"] = np.repeat(ends - LENGTHS, LENGTHS)[None].astype(np.int32)
    alone = {key: np.zeros((len(LENGTHS), model.seq_len), np.int32) for key in ("inputs", "targets")}
    alone["targets"] -= 1
    for row, (end, length) in enumerate(zip(ends, LENGTHS, strict=True)):
        for key, rows in alone.items():
            rows[row, :length] = packed[key][0, end - length : end]
    alone["rows"] = np.arange(len(LENGTHS), dtype=np.int32)
    with jax.enable_x64(True):
        config = proof_config(model, "", batch_size=1, steps=1, dtype="float64", mask_documents=True)
        found = observe(config, DEVICES[:1], [packed])
        config = proof_config(model, "", batch_size=len(LENGTHS), steps=1, dtype="float64")
        expected = observe(config, DEVICES[:1], [alone])
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-12)
    for leaf, theirs in expected.gradients[0].items():
        if not leaf.partition("[")[0].endswith(".load"):
            np.testing.assert_allclose(found.gradients[0][leaf], theirs, rtol=1e-9, atol=1e-12, err_msg=leaf)


def test_positions_begin_again_with_every_document():
    context = Context(starts_BT=jnp.asarray(np.repeat([0, 3, 4], [3, 1, 4])[None]))
    for positions in (context.positions, context.whole_positions):
        assert positions(8).tolist() == [[0, 1, 2, 0, 0, 1, 2, 3]]
    assert Context().positions(8).tolist() == [*range(8)]


@pytest.mark.parametrize(
    ("mesh", "parallel"),
    [("dp=2,tp=2", {"sp": True, "zero": 3}), pytest.param("pp=2", {"schedule": "zb-h1"}, marks=pytest.mark.exhaustive)],
)
def test_meshes_equal_one_device(mesh, parallel):
    jaxdist.verify(MODELS["windows"], mesh=mesh, mask_documents=True, **parallel).require()


def test_starts_of_documents():
    ends = np.array([[0, 1, 0, 0, 1, 1, 0], [1, 0, 0, 0, 0, 0, 1]], bool)
    np.testing.assert_array_equal(document_starts(ends), [[0, 0, 2, 2, 2, 5, 6], [0, 1, 1, 1, 1, 1, 1]])


def corpus_of(*ends) -> Corpus:
    text = np.random.default_rng(0).integers(0, 4, 500).astype(np.uint8)
    tokens = tokens_in(text, "text", 256)
    return Corpus(tuple(Source(tokens, tokens, f"part {i}", Fraction(1), "bytes", end) for i, end in enumerate(ends)))


@pytest.mark.parametrize("held_out", [False, True])
def test_batches_say_where_documents_begin(held_out):
    corpus = corpus_of(3)
    batch = held_out_batches(corpus, 4, 30, 4, True)[0] if held_out else Batches(corpus, 4, 30, 0, True)[2]
    found = batch.read()
    assert set(batch) == {"inputs", "targets", "rows", "starts"} and len(batch) == 4
    for inputs, targets, starts in zip(found["inputs"], found["targets"], found["starts"], strict=True):
        for place, start in enumerate(starts):
            assert 3 not in inputs[start:place] and (start == 0 or inputs[start - 1] == 3)
            padded = held_out and not inputs[place:].any()  # the last window ends before its row does
            assert padded or (targets[place] == -1) == (inputs[place] == 3)


def test_data_that_does_not_say_is_refused():
    for corpus, match in ((corpus_of(3, None), "bare tokens"), (corpus_of(3, 2), "and end with")):
        with pytest.raises(ConfigError, match=match):
            Batches(corpus, 4, 30, 0, True)
        with pytest.raises(ConfigError, match=match):
            held_out_batches(corpus, 4, 30, 4, True)


def test_answers_are_predicted_and_prompts_read(tmp_path, capsys):
    pairs = [(f"question {i}?", f"answer {i}.") for i in range(40)]
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in pairs]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    words = ["--data", str(tmp_path / "chats.jsonl"), "--out", str(tmp_path / "out"), "--tokenizer", "bytes"]
    with pytest.raises(SystemExit) as ended:
        run_program(PrepareFlags, main, "prepare", [*words, "--supervised"])
    assert ended.value.code in (0, None), capsys.readouterr()
    source = load_corpus(str(tmp_path / "out"), 256).sources[0]
    assert source.tokenizer == "bytes" and source.end_of_document == 0
    text = source.train.read(0, len(source.train))
    whole = bytes(unmasked(text).astype(np.uint8)).decode().split("\0")
    assert [(prompt + answer) for prompt, answer in pairs[: len(whole) - 1]] == whole[:-1]
    predicted = bytes(targets_of(text)[text >= 0].astype(np.uint8)).decode().split("\0")
    assert [answer for _, answer in pairs[: len(whole) - 1]] == predicted[:-1]
    found = Batches(Corpus((source,)), 2, 30, 0)[0].read()
    assert (found["targets"] == -1).any() and (found["inputs"] >= 0).all()
    seen = found["targets"][:, :-1] >= 0
    np.testing.assert_array_equal(found["targets"][:, :-1][seen], found["inputs"][:, 1:][seen])


def test_attention_is_written_out_unless_asked_for_in_blocks():
    config = proof_config(MODELS["gpt2"], "dp=2", dtype="bfloat16", mask_documents=True)
    mesh = make_abstract_mesh(parse_mesh("dp=2"))
    assert build_program(config, mesh).model.ctx.attention == "xla"
    blocked = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, attention="blocked"))
    assert build_program(blocked, mesh).model.ctx.attention == "blocked"
    with pytest.raises(ConfigError, match="attention=cudnn"):
        dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, attention="cudnn"))


@pytest.mark.parametrize(
    ("name", "text", "words", "match"),
    [
        ("a.txt", "text", ["--supervised"], "lines of .jsonl"),
        ("a.jsonl", '{"text": "a"}', ["--supervised"], '"prompt" and "answer"'),
        ("a.jsonl", '{"prompt": "a", "answer": 3}', ["--supervised"], '"prompt" and "answer"'),
        ("a.jsonl", '{"prompt": "a", "answer": "b"}', [], "prompts and answers: --supervised"),
    ],
)
def test_lines_that_are_no_prompts_and_answers_are_refused(tmp_path, capsys, name, text, words, match):
    (tmp_path / name).write_text(text)
    words += ["--data", str(tmp_path / name), "--out", str(tmp_path / "out"), "--tokenizer", "bytes"]
    with pytest.raises(SystemExit) as ended:
        run_program(PrepareFlags, main, "prepare", words)
    assert ended.value.code == 2 and match in capsys.readouterr().err
