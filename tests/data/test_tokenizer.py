"""Other people's tokenizers: what stands around a text, and that tokens are a function of the text alone."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.programs import run

from experiments import prepare
from jaxdist.data.text_stream import TextStream
from jaxdist.data.tokenizer import BPETokenizer, ByteTokenizer, with_template
from jaxdist.data.tokens import unmasked
from jaxdist.errors import ConfigError

tokenizers = pytest.importorskip("tokenizers", reason="pip install -e '.[data]'")
TEXT = "Hello world, 2+2=4 and 3+3=6.\n\nA second line; naïve café 日本\n"


def spm(template: str = "<s> $A", model: str = "BPE"):
    """A tokenizer like Llama 2's: spaces are part of words, one is put before a text, other characters are bytes."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    replace, fallback = tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback()
    strip = tokenizers.decoders.Strip(" ", 1, 0)
    inner.decoder = tokenizers.decoders.Sequence([replace, fallback, tokenizers.decoders.Fuse(), strip])
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=names, show_progress=False)
    inner.train_from_iterator([TEXT] * 20 + ["Hello Hello world world 4 4 = + 6"] * 20, trainer)
    described = json.loads(inner.to_str())
    described["added_tokens"] = described["added_tokens"][:3]  # bytes are no special tokens
    inner = tokenizers.Tokenizer.from_str(json.dumps(described))
    ids = [(name, inner.token_to_id(name)) for name in ("<s>", "</s>")]
    inner.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=ids)
    return inner


def byte_level():
    return tokenizers.Tokenizer.from_str(BPETokenizer.train(iter([TEXT] * 9), 300).to_bytes().decode())


KINDS = {"spm": spm, "byte-level": byte_level}
END = {"spm": "</s>", "byte-level": "<|endoftext|>"}


@pytest.mark.parametrize("kind", KINDS)
def test_what_somebody_s_last_call_left_in_the_file_is_off(kind):
    inner = KINDS[kind]()
    [expected] = BPETokenizer(inner.to_str(), "clean").encode([TEXT])
    inner.enable_truncation(4)
    inner.enable_padding(direction="left", length=200)
    found = BPETokenizer(inner.to_str(), "used")
    np.testing.assert_array_equal(found.encode([TEXT])[0], expected)
    described = json.loads(found.to_bytes())
    assert described["truncation"] is None is described["padding"]
    assert found.identity == BPETokenizer(KINDS[kind]().to_str(), "clean").identity


def test_a_tokenizer_that_draws_its_tokens_is_refused():
    described = json.loads(byte_level().to_str())
    described["model"]["dropout"] = 0.1
    with pytest.raises(ConfigError, match="dropout"):
        BPETokenizer(json.dumps(described), "drawn")


@pytest.mark.parametrize(
    ("template", "config", "begin", "end"),
    [
        ("$A", {}, [], "<|endoftext|>"),
        ("<s> $A", {}, ["<s>"], "<|endoftext|>"),
        ("<s> $A </s>", {}, ["<s>"], "</s>"),
        ("<s> $A", {"eos_token": "</s>"}, ["<s>"], "</s>"),
        ("<s> <s> $A", {"eos_token": {"__type": "AddedToken", "content": "</s>"}}, ["<s>", "<s>"], "</s>"),
        ("$A", {"bos_token": "<s>", "add_bos_token": True, "eos_token": "</s>"}, [], "</s>"),
    ],
)
def test_one_place_says_what_stands_around_a_text(tmp_path, template, config, begin, end):
    inner = spm(template)
    inner.add_special_tokens(["<|endoftext|>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = BPETokenizer.load(tmp_path / "tokenizer.json")
    assert [found.name(token) for token in found.begin_of_text] == begin and found.name(found.end_of_document) == end
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[oracle]'")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))("Hello world").input_ids
    ours = [*found.begin_of_text, *found.encode(["Hello world"])[0]]
    assert theirs[: len(ours)] == ours


def test_a_template_is_put_into_a_tokenizer(tmp_path):
    inner = tokenizers.Tokenizer.from_str(with_template(spm("$A </s>").to_str().encode(), ("<s>",)).decode())
    assert inner.encode("Hello").tokens[0] == "<s>" and inner.encode("Hello").tokens[-1] != "</s>"


@settings(max_examples=60, deadline=None)
@given(st.text("Helo wrd24=+.\né日 ", max_size=12), st.text("Helo wrd24=+.\né日 ", max_size=30))
@pytest.mark.parametrize("kind", [*KINDS, "bytes"])
def test_a_stream_is_what_the_text_becomes_longer_by(kind, prompt, text):
    tokenizer = ByteTokenizer() if kind == "bytes" else BPETokenizer(CACHED[kind], kind)
    [tokens], [before] = tokenizer.encode([prompt + text]), tokenizer.encode([prompt])
    if len(before) and not np.array_equal(tokens[: len(before)], before):
        return  # no generation goes on like that
    stream = TextStream(tokenizer, prompt=before.tolist())
    shown = "".join(stream.add(int(token)) for token in tokens[len(before) :]) + stream.close()
    assert tokenizer.decode(before) + shown == tokenizer.decode(tokens)


CACHED = {kind: make().to_str() for kind, make in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_is_cut_only_where_no_token_changes(kind, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(prepare, "PIECE_BYTES", 200)
    monkeypatch.setattr(prepare, "CONTEXT_BYTES", 64)
    cut = prepare.cut_units
    monkeypatch.setattr(prepare, "cut_units", lambda root, sizes, _, tokenizer: cut(root, sizes, 1000, tokenizer))
    rng = np.random.default_rng(0)
    words = ["Hello", "world,", "2+2=4", "naïve", "日本", "\n", "\n\n", "  "]
    documents = [" ".join(rng.choice(words, 900)) for _ in range(2)]
    (tmp_path / "text").mkdir()
    for number, text in enumerate(documents):
        (tmp_path / "text" / f"{number}.txt").write_text(text)
    (tmp_path / "tokenizer.json").write_text(CACHED[kind])
    out = prepared(tmp_path, capfd, "--data", tmp_path / "text", "--end-of-document", END[kind])
    tokenizer, found = BPETokenizer.load(tmp_path / "tokenizer.json", END[kind]), []
    assert len(list(out.glob("*.npy"))) > 4
    for split in ("train", "held_out"):
        tokens = np.concatenate([np.load(path) for path in sorted(out.glob(f"{split}-*.npy"))])
        cuts = np.flatnonzero(tokens == tokenizer.end_of_document)
        found += [part[part != tokenizer.end_of_document] for part in np.split(tokens, cuts + 1)][:-1]
    wholes = [[*tokenizer.begin_of_text, *tokens] for tokens in tokenizer.encode(documents)]
    assert sorted(map(tuple, found)) == sorted(map(tuple, wholes))


def prepared(folder: Path, capfd, *words) -> Path:
    words = [*words, "--tokenizer", folder, "--out", folder / "out"]
    code, out, err = run(capfd, "prepare", *words)
    assert code == 0, out + err
    return folder / "out"


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_and_answer_are_one_text(kind, tmp_path, capfd):
    pairs = [("2+2=", "4"), ("Hello wor", "ld"), ("3+3= ", "6."), ("日", "本"), ("", "Hello")] * 4
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in pairs]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    (tmp_path / "tokenizer.json").write_text(CACHED[kind])
    out = prepared(tmp_path, capfd, "--data", tmp_path / "chats.jsonl", "--supervised", "--end-of-document", END[kind])
    tokenizer = BPETokenizer.load(tmp_path / "tokenizer.json", END[kind])
    signed = np.concatenate([np.load(out / f"{split}-00000.npy") for split in ("train", "held_out")])
    ends = np.flatnonzero(signed == tokenizer.end_of_document)
    for (prompt, answer), part in zip(pairs, np.split(signed, ends + 1), strict=False):
        part = part[:-1]
        whole = [*tokenizer.begin_of_text, *tokenizer.encode([prompt + answer])[0]]
        assert unmasked(part).tolist() == whole
        read = tokenizer.decode(unmasked(part[part < 0])[len(tokenizer.begin_of_text) :])
        # What is read is of the prompt alone, and all of the prompt's tokens but one that reaches into the answer.
        read = read.rstrip("\ufffd")
        assert prompt.startswith(read) and (part >= 0).any() and len(prompt) - len(read) < 6


def test_a_stream_shows_a_long_run_of_characters_that_are_bytes():
    """A context that began within one of them made all of the run undecodable."""
    tokenizer, start = BPETokenizer(CACHED["spm"], "spm"), "語" * 7
    [before], [tokens] = tokenizer.encode([start]), tokenizer.encode([start + "語ы" * 9 + " Hello"])
    for prompt in ([], before.tolist()):
        stream = TextStream(tokenizer, prompt=prompt)
        shown = "".join(stream.add(int(token)) for token in tokens[len(prompt) :]) + stream.close()
        assert tokenizer.decode(np.asarray(prompt, np.int64)) + shown == tokenizer.decode(tokens)


def test_a_tokenizer_that_cannot_encode_every_text_is_refused_by_name():
    words = tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0}, unk_token="[UNK]"))
    pieces = tokenizers.Tokenizer(tokenizers.models.Unigram([("a", -1.0)]))
    empty = tokenizers.Tokenizer(tokenizers.models.BPE())
    for inner in (words, pieces, empty):
        with pytest.raises(ConfigError, match="mine"):
            BPETokenizer(inner.to_str(), "mine").encode_with_stops(["b"])
