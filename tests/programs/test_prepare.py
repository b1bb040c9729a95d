"""Preparing a corpus: what the shards hold, killed and continued runs, and every damage that must be refused."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from experiments import prepare as program
from experiments.prepare import PrepareFlags, Range, cut_units, main, open_journal, read_pieces
from jaxdist.data import tokens as tokens_module
from jaxdist.data.batches import Corpus, load_corpus
from jaxdist.data.prepared import JOURNAL, MANIFEST, check_prepared
from jaxdist.data.tokenizer import END_OF_DOCUMENT, BPETokenizer, ByteTokenizer
from jaxdist.errors import ConfigError
from jaxdist.runtime.run_folder import LOCK, held

VOCAB_SIZE = 300
WORDS = ["le", "cœur", "a", "ses", "raisons", "que", "la", "raison", "ne", "connaît", "point"]


def run(**flags) -> str:
    """The output of `experiments.prepare`, which must succeed."""
    console = Console(file=open(os.devnull, "w"), record=True, width=200)  # noqa: SIM115
    assert main(PrepareFlags(**flags), console) == 0
    return console.export_text()


def refused(*expected: str, **flags) -> None:
    with pytest.raises(ConfigError) as caught:
        main(PrepareFlags(**flags), Console(quiet=True))
    for words in expected:
        assert words in str(caught.value)


def not_opened(folder: Path, *expected: str, vocab_size: int = VOCAB_SIZE) -> None:
    with pytest.raises(ConfigError) as caught:
        load_corpus(str(folder), vocab_size)
    for words in expected:
        assert words in str(caught.value)


def whole(corpus: Corpus) -> tuple[np.ndarray, np.ndarray]:
    return tuple(tokens.read(0, len(tokens)) for tokens in (corpus.sources[0].train, corpus.sources[0].held_out))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Thirty documents; three of them are held out by the hash of their names."""
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    for number in range(30):
        lines = [" ".join(rng.choice(WORDS, 8)) for _ in range(40)]
        (folder / f"{number}.txt").write_text("\n".join(lines), encoding="utf-8")
    (folder / "empty.txt").write_text("")
    (folder / "special.txt").write_text(f"a{END_OF_DOCUMENT}b \x01\r\n\ttabs  and   spaces\n\n\n日本", newline="")
    return folder


@pytest.fixture
def small(monkeypatch):
    """Shards of 5 kB of text, pieces of 256 bytes."""
    monkeypatch.setattr(program, "PIECE_BYTES", 256)
    monkeypatch.setattr(program, "BATCH_BYTES", 1024)
    cut = program.cut_units
    monkeypatch.setattr(program, "cut_units", lambda root, sizes, _, tokenizer: cut(root, sizes, 5000, tokenizer))


@pytest.fixture(scope="module")
def bpe(text, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("prepared") / "bpe"
    run(data=str(text), out=str(folder), vocab_size=VOCAB_SIZE)
    return folder


@pytest.fixture
def copy(bpe, tmp_path) -> Path:
    return shutil.copytree(bpe, tmp_path / "copy")


# ---------------------------------------------------------------------------------------------------------------------
# What is made
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{"vocab_size": VOCAB_SIZE}, {"tokenizer": "bytes"}], ids=["bpe", "bytes"])
def test_every_document_comes_back(how, text, tmp_path, small):
    """Decoded, the shards are the documents in order, held-out ones apart, split as the folder itself is split."""
    out = tmp_path / "out"
    run(data=str(text), out=str(out), **how)
    tokenizer = ByteTokenizer() if "tokenizer" in how else BPETokenizer.load(out / "tokenizer.json")
    corpus = load_corpus(str(out), tokenizer.vocab_size)
    assert len(corpus.sources[0].train.parts) > 2
    documents = []
    for tokens in whole(corpus):
        assert tokens[-1] == tokenizer.end_of_document
        cuts = np.flatnonzero(tokens == tokenizer.end_of_document)
        documents.append([tokenizer.decode(part).strip("\0") for part in np.split(tokens, cuts)])
    found = [{text.removeprefix(END_OF_DOCUMENT) for text in part if text} for part in documents]

    plain = load_corpus(str(text), 256)
    for part, tokens in zip(found, whole(plain), strict=True):
        expected = tokens.astype(np.uint8).tobytes().decode().split("\0")
        assert part - {""} == set(expected)
    assert len(found[0] | found[1]) - ("" in found[0] | found[1]) == 31


def test_prepared_again_it_is_the_same_to_the_byte(bpe, text, tmp_path):
    run(data=str(text), out=str(tmp_path / "again"), vocab_size=VOCAB_SIZE)
    assert contents(tmp_path / "again") == contents(bpe)


def test_a_loaded_tokenizer_gives_what_the_trained_one_gave(bpe, text, tmp_path):
    run(data=str(text), out=str(tmp_path / "again"), tokenizer=str(bpe / "tokenizer.json"))
    assert contents(tmp_path / "again") == contents(bpe)


@settings(max_examples=40, deadline=None)
@given(st.text())
def test_decoding_gives_the_text_back(bpe, text):
    for tokenizer in (ByteTokenizer(), BPETokenizer.load(bpe / "tokenizer.json")):
        [tokens] = tokenizer.encode([text])
        assert tokenizer.decode(tokens) == text
        assert text.count("\0") or tokenizer.end_of_document not in tokens


def test_vocabularies_above_16_bits_have_wider_tokens(bpe):
    content = json.loads((bpe / "tokenizer.json").read_text())
    content["model"]["vocab"]["a token far away"] = 70_000
    tokenizer = BPETokenizer(json.dumps(content), "wide")
    assert (tokenizer.vocab_size, tokenizer.dtype) == (70_001, "uint32")


def test_lines_of_jsonl_are_documents(tmp_path):
    (tmp_path / "text").mkdir()
    lines = [json.dumps({"text": f"document {number}\nof two lines", "other": 1}) for number in range(50)]
    (tmp_path / "text" / "a.jsonl").write_text("\ufeff" + "\n\n".join(lines) + "\n")  # a byte order mark
    run(data=str(tmp_path / "text"), out=str(tmp_path / "out"), tokenizer="bytes")
    train, held_out = whole(load_corpus(str(tmp_path / "out"), 256))
    texts = np.concatenate([train, held_out]).astype(np.uint8).tobytes().split(b"\0")
    assert texts == [*(f"document {number}\nof two lines".encode() for number in range(50)), b""]
    assert held_out[-1] == 0 and train[-1] == 0
    for bad in ("[1]", '{"text": 1}', "{", '{"other": ""}', '{"text": "half \\ud83d"}'):
        (tmp_path / "text" / "a.jsonl").write_text(f'{{"text": "fine"}}\n{bad}\n')
        (tmp_path / "text" / "b.jsonl").write_text('{"text": "fine"}\n')
        refused("a.jsonl", "offset 17 ", data=str(tmp_path / "text"), out=str(tmp_path / "bad"), tokenizer="bytes")
        shutil.rmtree(tmp_path / "bad")


@settings(max_examples=80, deadline=None)
@given(
    texts=st.lists(st.text(alphabet="ab\né日", min_size=1, max_size=60), min_size=1, max_size=5),
    unit=st.integers(1, 40),
)
def test_units_and_pieces_cover_the_text(texts, unit, tmp_path_factory):
    """No byte twice or missed, no character cut, however small the shards and pieces are."""
    root = tmp_path_factory.mktemp("units")
    sizes = {}
    for number, text in enumerate(texts):
        (root / str(number)).write_bytes(text.encode())
        sizes[str(number)] = len(text.encode())
    before, program.PIECE_BYTES = program.PIECE_BYTES, 8
    try:
        units = cut_units(root, sizes, unit, None)
        found = dict.fromkeys(sizes, "")
        for split in units.values():
            for part in (part for unit in split for part in unit):
                for piece in read_pieces(root, part):
                    found[part.name] += piece.text
    finally:
        program.PIECE_BYTES = before
    assert list(found.values()) == texts


def test_a_file_that_is_cut_while_it_is_read_is_refused(tmp_path):
    (tmp_path / "a.JSONL").write_text('{"text": "one"}\n')
    with pytest.raises(ConfigError, match="must not be cut"):
        list(read_pieces(tmp_path, Range("a.JSONL", 0, 0, 100, True)))


# ---------------------------------------------------------------------------------------------------------------------
# Killed and continued
# ---------------------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Not an Exception: nothing may catch it, as nothing catches a SIGKILL."""


@pytest.mark.parametrize("half", [False, True], ids=["between", "half-written"])
def test_killed_at_any_write_it_continues_to_the_same_bytes(half, text, tmp_path, small, monkeypatch):
    """Killed again and again, at its second or third rename, it goes on from where it was."""
    run(data=str(text), out=str(tmp_path / "straight"), vocab_size=VOCAB_SIZE)
    replace, encode_unit = os.replace, program.encode_unit
    encoded = []

    def counted(*args):
        encoded.append(args[1][0])
        return encode_unit(*args)

    monkeypatch.setattr(program, "encode_unit", counted)
    out, kills = tmp_path / "killed", 0
    for attempt in range(100):
        left = 2 + attempt % 2  # a shard and the journal are a rename each, so both are cut off

        def kill(source, target):
            nonlocal left
            left -= 1
            if left == 0:
                if half:
                    os.truncate(source, os.path.getsize(source) // 2)
                raise Killed
            replace(source, target)

        monkeypatch.setattr(os, "replace", kill)
        try:
            output = run(data=str(text), out=str(out), vocab_size=VOCAB_SIZE)
            break
        except Killed:
            kills += 1
            if (out / JOURNAL).exists():
                not_opened(out, MANIFEST, "same `python -m experiments.prepare` command")
    assert kills > 5 and "continuing" in output
    assert contents(out) == contents(tmp_path / "straight")
    assert len(encoded) <= len(list(out.glob("*.npy"))) + kills  # a kill costs one shard at most


def test_a_shard_that_changed_since_is_made_again(text, tmp_path, small, monkeypatch):
    run(data=str(text), out=str(tmp_path / "straight"), tokenizer="bytes")
    out = tmp_path / "out"
    encode_unit, left = program.encode_unit, 3

    def stop(*args):
        nonlocal left
        left -= 1
        if left == 0:
            raise Killed
        return encode_unit(*args)

    monkeypatch.setattr(program, "encode_unit", stop)
    with pytest.raises(Killed):
        run(data=str(text), out=str(out), tokenizer="bytes")
    monkeypatch.setattr(program, "encode_unit", encode_unit)
    (out / "train-00000.npy").write_bytes(b"other")
    (out / "train-00001.npy").unlink()
    run(data=str(text), out=str(out), tokenizer="bytes")
    assert contents(out) == contents(tmp_path / "straight")


def test_only_the_same_preparation_is_continued(text, tmp_path, monkeypatch):
    changing = shutil.copytree(text, tmp_path / "text")
    flags = {"data": str(changing), "out": str(tmp_path / "out")}

    def stop(*_):
        raise Killed

    monkeypatch.setattr(program, "encode_unit", stop)
    with pytest.raises(Killed):
        run(**flags, vocab_size=VOCAB_SIZE)
    refused("vocab_size changed since", **flags, vocab_size=VOCAB_SIZE + 1)
    refused("tokenizer, end_of_document changed since", **flags, tokenizer="bytes")
    refused("shard_mb changed since", **flags, vocab_size=VOCAB_SIZE, shard_mb=1)
    (changing / "new.txt").write_text("new")
    refused("files changed since", **flags, vocab_size=VOCAB_SIZE)
    (changing / "new.txt").unlink()
    os.utime(changing / "0.txt", (0, 0))  # written again, with as many bytes
    refused("files changed since", **flags, vocab_size=VOCAB_SIZE)


def test_a_full_disk_is_named_and_the_run_continues(text, tmp_path, monkeypatch):
    fsync, left = os.fsync, 6

    def full(descriptor):
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    refused("No space left on device", data=str(text), out=str(tmp_path / "out"), tokenizer="bytes")
    run(data=str(text), out=str(tmp_path / "out"), tokenizer="bytes")
    check_prepared(tmp_path / "out")


# ---------------------------------------------------------------------------------------------------------------------
# Damage
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["train-00000.npy", "held_out-00000.npy", "tokenizer.json"])
def test_cut_longer_or_deleted_files_are_refused_by_name(name, copy):
    content = (copy / name).read_bytes()
    for damaged in (content[:-1], content + b"\0", b""):
        (copy / name).write_bytes(damaged)
        not_opened(copy, name, f"{len(content)} bytes", f"has {len(damaged)}")
    (copy / name).unlink()
    not_opened(copy, name, "the manifest")


@pytest.mark.parametrize("name", ["train-00000.npy", "held_out-00000.npy", "tokenizer.json"])
def test_a_flipped_byte_is_found_by_check(name, copy):
    content = bytearray((copy / name).read_bytes())
    content[-1] ^= 1
    (copy / name).write_bytes(content)
    load_corpus(str(copy), VOCAB_SIZE)
    refused(name, "SHA-256", "was changed", check=str(copy))


def test_a_token_outside_the_vocabulary_is_refused_when_it_is_read(copy):
    path = copy / "train-00000.npy"
    content = bytearray(path.read_bytes())
    content[-2:] = (VOCAB_SIZE).to_bytes(2, "little")
    path.write_bytes(content)
    corpus = load_corpus(str(copy), 1000)  # a larger model does not make it a token
    with pytest.raises(ConfigError, match=rf"token {VOCAB_SIZE} at position .* token < {VOCAB_SIZE}"):
        whole(corpus)


def test_a_shard_of_another_corpus_is_refused(copy):
    path = copy / "train-00000.npy"
    tokens = np.load(path)
    np.save(path, tokens.view(np.int16))  # as many bytes, of another dtype
    not_opened(copy, "train-00000.npy", "int16")


def test_a_link_out_of_the_folder_is_refused(copy, tmp_path):
    shutil.move(copy / "train-00000.npy", tmp_path / "elsewhere.npy")
    (copy / "train-00000.npy").symlink_to(tmp_path / "elsewhere.npy")
    not_opened(copy, "train-00000.npy", "regular file")


def edit(folder: Path, change) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda m: m["train"][0].update(name="../../secret.npy"), "'../../secret.npy'"),
        (lambda m: m["train"][0].update(name="/etc/passwd"), "'/etc/passwd'"),
        (lambda m: m["train"][0].update(name="held_out-00000.npy"), "held_out-00000.npy"),
        (lambda m: m["tokenizer"].update(name="../tokenizer.json"), "'../tokenizer.json'"),
        (lambda m: m["train"].append(m["train"][0]), "train-00001.npy"),
        (lambda m: m.update(format="another"), "whose format is"),
        (lambda m: m.pop("vocab_size"), "vocab_size"),
        (lambda m: m.update(vocab_size=0), "vocabulary of 0"),
        (lambda m: m.update(vocab_size=True), "vocab_size=True"),
        (lambda m: m.update(vocab_size=1e300), "vocab_size=1e+300"),
        (lambda m: m.update(train={}), "train={}"),
        (lambda m: m.update(train=["train-00000.npy"]), "train="),
        (lambda m: m.update(dtype="object"), "dtype must be one of uint8"),
        (lambda m: m.update(end_of_document=VOCAB_SIZE), "end_of_document (300,)"),
        (lambda m: m["train"][0].update(num_tokens=-1), "manifest's -1 uint16 tokens"),
        (lambda m: m["train"][0].update(num_tokens=5), "manifest's 5 uint16 tokens"),
        (lambda m: m["train"][0].update(sha256=1), "train="),
        (lambda m: m.update(tokenizer=[]), "tokenizer=[]"),
    ],
)
def test_a_wrong_or_hostile_manifest_is_refused(change, expected, copy):
    edit(copy, change)
    not_opened(copy, expected)
    refused(expected, check=str(copy))


# ---------------------------------------------------------------------------------------------------------------------
# Flags
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [555, 955])  # the last tenth is held out
def test_check_reads_the_tokens_that_opening_does_not(position, tmp_path, monkeypatch):
    monkeypatch.setattr(tokens_module, "CHUNK", 10)
    monkeypatch.setattr(tokens_module, "SAMPLED_CHUNKS", 2)  # the first and the last
    tokens = np.zeros(1000, np.uint16)
    tokens[position] = 50
    np.save(tmp_path / "a.npy", tokens)
    load_corpus(str(tmp_path / "a.npy"), 50)
    refused(f"token 50 at position {position} ", check=str(tmp_path / "a.npy"), vocab_size=50)


def test_two_preparations_do_not_share_a_folder(text, tmp_path):
    out, flags = tmp_path / "corpus", {"data": str(text), "tokenizer": "bytes"}
    with held(out, "out", print):
        refused("is using it", out=str(out), **flags)
    run(out=str(out), **flags)
    assert not (out / LOCK).exists()


def test_what_a_preparation_has_no_more_is_named(tmp_path):
    open_journal(tmp_path, {"shard_mb": 1, "supervised": True})
    with pytest.raises(ConfigError, match="preparation: supervised changed since"):
        open_journal(tmp_path, {"shard_mb": 1})


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"plan": 1, "shards": {}}'])
def test_a_damaged_journal_is_refused(content, text, tmp_path):
    (tmp_path / JOURNAL).write_text(content)
    refused(JOURNAL, "damaged", data=str(text), out=str(tmp_path), tokenizer="bytes")


def test_a_missing_manifest_is_a_folder_that_is_not_whole(copy):
    (copy / MANIFEST).unlink()
    not_opened(copy, MANIFEST, "manifest.json")


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_a_token_outside_the_vocabulary_is_found_by_check_where_the_sha_256_fits(split, copy):
    path = copy / f"{split}-00000.npy"
    path.write_bytes(path.read_bytes()[:-2] + VOCAB_SIZE.to_bytes(2, "little"))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    edit(copy, lambda manifest: manifest[split][0].update(sha256=digest))
    refused(f"token {VOCAB_SIZE} at position", path.name, check=str(copy))


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff", b"[]", b"null", b"[" * 100_000, b'{"format": "jaxdist tokens 2"}']
)
def test_a_damaged_manifest_is_refused(content, copy):
    (copy / MANIFEST).write_bytes(content)
    not_opened(copy, MANIFEST)


def test_a_huge_manifest_is_not_read(copy):
    with open(copy / MANIFEST, "r+b") as file:
        file.truncate(1 << 33)  # sparse
    not_opened(copy, MANIFEST, "67,108,864")


def test_a_vocabulary_must_have_the_tokens_that_are_there_and_no_others(copy):
    """As of a published model whose tokenizer has a token for padding beyond the table."""
    manifest = json.loads((copy / MANIFEST).read_text())
    (copy / MANIFEST).write_text(json.dumps(manifest | {"vocab_size": VOCAB_SIZE + 9}))
    largest = max(part.max() for part in whole(load_corpus(str(copy), VOCAB_SIZE + 20)))
    assert load_corpus(str(copy), largest + 1).num_train > 0
    not_opened(copy, f"token {largest} at", f"Use vocab_size={largest + 1}", vocab_size=largest)


def test_sources_of_different_tokenizers_are_not_mixed(bpe, text, tmp_path):
    with pytest.raises(ConfigError, match="one tokenizer"):
        load_corpus(f"{bpe}=1,{text}=1", VOCAB_SIZE)
    again = shutil.copytree(bpe, tmp_path / "again")
    np.save(tmp_path / "unknown.npy", np.zeros(100, int))
    assert len(load_corpus(f"{bpe}=1,{again}=1,{tmp_path}/unknown.npy=1", VOCAB_SIZE).sources) == 3


def test_folders_with_something_in_them_are_left_alone(text, bpe, tmp_path):
    before = hashlib.sha256(b"".join(contents(bpe).values())).hexdigest()
    refused("prepared corpus", data=str(text), out=str(bpe), vocab_size=VOCAB_SIZE)
    assert hashlib.sha256(b"".join(contents(bpe).values())).hexdigest() == before
    (tmp_path / "mine").write_text("mine")
    refused("empty folder", data=str(text), out=str(tmp_path), tokenizer="bytes")


def test_text_too_short_to_train_on_is_refused(tmp_path):
    (tmp_path / "few.jsonl").write_text('\n\n{"text": "a"}\n\n')
    refused("held-out tokens", data=str(tmp_path / "few.jsonl"), out=str(tmp_path / "out"), tokenizer="bytes")


def test_text_that_is_not_utf8_is_named_with_its_offset(tmp_path, small):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_bytes(b"line\n" * 400 + b"\xff" + b"\nline" * 400)
    (tmp_path / "text" / "b.txt").write_bytes(b"line\n")
    refused("a.txt", "0xff at offset 2000 ", data=str(tmp_path / "text"), out=str(tmp_path / "out"), tokenizer="bytes")
