"""The tokens of every kind of input, and every input that must be refused."""

import math
import os
import pickle
import sysconfig
import tracemalloc
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from jaxdist.data import batches as data
from jaxdist.data import tokens as tokens_module
from jaxdist.data.batches import Batches, Corpus, Source, load_corpus, parse_sources
from jaxdist.data.order import make_mixture
from jaxdist.data.tokens import Part, TokenFile, Tokens, unigram_entropy
from jaxdist.errors import ConfigError


def write_tree(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def train_of(corpus: Corpus) -> np.ndarray:
    """Every training token."""
    return whole(corpus.sources[0].train)


def held_out_of(corpus: Corpus) -> np.ndarray:
    return whole(corpus.sources[0].held_out)


def whole(tokens: Tokens) -> np.ndarray:
    return tokens.read(0, len(tokens))


def text_of(tokens: np.ndarray) -> bytes:
    return tokens.astype(np.uint8).tobytes()


def documents(tokens: np.ndarray) -> list[bytes]:
    return text_of(tokens).split(b"\0")


def held(array: np.ndarray, vocab_size: int = 2**31 - 1) -> Tokens:
    return Tokens([Part(array, "array", 0, len(array))], vocab_size)


def refused(path, *expected: str, vocab_size: int = 256) -> None:
    """Loading fails with a ConfigError that names the file and says each of `expected`."""
    with pytest.raises(ConfigError) as caught:
        load_corpus(str(path), vocab_size)
    for words in (str(path), *expected):
        assert words in str(caught.value)


# ---------------------------------------------------------------------------------------------------------------------
# Text
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 9, 10, 1009])
def test_text_file_holds_out_its_last_tenth(size, tmp_path):
    text = bytes(32 + i % 90 for i in range(size))
    (tmp_path / "a.txt").write_bytes(text)
    corpus = load_corpus(str(tmp_path / "a.txt"), 256)
    assert text_of(train_of(corpus)) + text_of(held_out_of(corpus)) == text
    assert corpus.num_held_out == math.ceil(size / 10)
    assert str(tmp_path / "a.txt") in corpus.about


def test_text_tokens_are_bytes(tmp_path):
    (tmp_path / "a").write_text("é" * 10, encoding="utf-8")
    corpus = load_corpus(str(tmp_path / "a"), 256)
    np.testing.assert_array_equal(train_of(corpus), [0xC3, 0xA9] * 9)
    np.testing.assert_array_equal(held_out_of(corpus), [0xC3, 0xA9])


def test_empty_file_is_refused(tmp_path):
    for name in ("a.txt", "a.bin"):
        (tmp_path / name).write_bytes(b"")
        refused(tmp_path / name, "empty")
    np.save(tmp_path / "a.npy", np.zeros(0, np.uint16))
    refused(tmp_path / "a.npy", "empty")


# ---------------------------------------------------------------------------------------------------------------------
# Folders
# ---------------------------------------------------------------------------------------------------------------------


def test_folder_reads_every_visible_file_sorted(tmp_path, monkeypatch):
    write_tree(
        tmp_path,
        {"b.md": b"b", "sub/deep/c": b"c", "a.txt": b"a", "d.txt": b"d", "empty": b""}
        | {".hidden": b"hidden", ".git/config": b"hidden", "sub/.cache/x": b"hidden"},
    )
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")  # an entry that is not a regular file
    (tmp_path / "linked").symlink_to(write_tree(tmp_path.with_name("elsewhere"), {"e": b"e", "f": b"f"}))
    (tmp_path / "sub" / "round").symlink_to(tmp_path)
    monkeypatch.setattr(data, "_is_held_out", lambda name: name in ("b.md", "sub/deep/c"))
    corpus = load_corpus(str(tmp_path), 256)
    assert documents(train_of(corpus)) == [b"a", b"d", b"e", b"f"]
    assert documents(held_out_of(corpus)) == [b"b", b"c"]
    assert "6 files" in corpus.about


def test_folder_where_the_hash_leaves_a_side_empty_holds_out_its_last_file(tmp_path, monkeypatch):
    write_tree(tmp_path, {"a": b"a", "b": b"b", "c": b"c"})
    for everything in (False, True):
        monkeypatch.setattr(data, "_is_held_out", lambda name, everything=everything: everything)
        corpus = load_corpus(str(tmp_path), 256)
        assert documents(train_of(corpus)) == [b"a", b"b"]
        assert documents(held_out_of(corpus)) == [b"c"]


def test_folder_of_one_file_holds_out_its_last_tenth(tmp_path):
    write_tree(tmp_path, {"only": b"0123456789" * 2, "empty": b""})
    corpus = load_corpus(str(tmp_path), 256)
    assert text_of(train_of(corpus)) == b"012345678901234567"
    assert text_of(held_out_of(corpus)) == b"89"


# ---------------------------------------------------------------------------------------------------------------------
# Token files
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "i4", "i8", "u8"])
def test_npy_is_read_in_place_in_its_own_dtype(dtype, tmp_path):
    tokens = (np.arange(1009) % 251).astype(dtype)
    np.save(tmp_path / "a.npy", tokens)
    [source] = load_corpus(str(tmp_path / "a.npy"), 251).sources
    for part, expected in ((source.train, tokens[:908]), (source.held_out, tokens[908:])):
        [opened] = part.parts
        assert isinstance(opened.array, TokenFile) and opened.array.dtype == np.dtype(dtype)
        read = whole(part)
        assert type(read) is np.ndarray and read.dtype == np.int32
        np.testing.assert_array_equal(read, expected)
    assert unigram_entropy([(source.train, 1)]) == pytest.approx(unigram_entropy([(held(tokens[:908]), 1)]))


def test_bin_is_read_in_place_as_little_endian_uint16(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes([1, 2] * 9 + [3, 0]))
    corpus = load_corpus(str(tmp_path / "a.bin"), 514)
    assert isinstance(corpus.sources[0].train.parts[0].array, TokenFile)
    np.testing.assert_array_equal(train_of(corpus), [0x0201] * 9)
    np.testing.assert_array_equal(held_out_of(corpus), [3])


def test_a_large_file_is_looked_at_in_an_even_sample(tmp_path, monkeypatch):
    """Opening, entropy and a batch of a file read a bounded number of its tokens, the first and last among them."""
    monkeypatch.setattr(tokens_module, "CHUNK", 1000)
    monkeypatch.setattr(tokens_module, "SAMPLED_CHUNKS", 8)
    with open(tmp_path / "a.bin", "wb") as file:
        file.truncate(2 * 10_000_000)  # a sparse file of zeros
    read = []
    checked = tokens_module.check_vocabulary
    monkeypatch.setattr(
        tokens_module,
        "check_vocabulary",
        lambda tokens, part, position, vocab: (
            read.append((position, len(tokens))) or checked(tokens, part, position, vocab)
        ),
    )
    corpus = load_corpus(str(tmp_path / "a.bin"), 1)
    assert read[0][0] == 0 and sum(read[-1]) == 10_000_000
    assert corpus.unigram_entropy() == 0
    assert sum(count for _, count in read) <= 3 * 8 * 1000
    read.clear()
    Batches(corpus, 2, 8, 0)[0].read()
    assert sum(count for _, count in read) == 2 * 9


def test_a_file_is_never_loaded_whole(tmp_path):
    num_tokens = 24_000_000
    with open(tmp_path / "a.bin", "wb") as file:
        file.truncate(2 * num_tokens)
    tracemalloc.start()
    corpus = load_corpus(str(tmp_path / "a.bin"), 1)
    assert corpus.unigram_entropy() == 0
    Batches(corpus, 2, 8, 0)[0].read()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < num_tokens / 4


def test_a_file_cut_while_it_is_read_is_an_error_with_its_name(tmp_path):
    np.arange(1000, dtype="<u2").tofile(tmp_path / "a.bin")
    batches = Batches(load_corpus(str(tmp_path / "a.bin"), 1000), 4, 10, 0)
    batches[0].read()
    os.truncate(tmp_path / "a.bin", 10)
    with pytest.raises(ConfigError, match=r"a\.bin.*1000 tokens"):
        batches[1].read()


class Bomb:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_pickled_npy_is_never_unpickled(tmp_path):
    marker, path = tmp_path / "exploded", tmp_path / "a.npy"
    np.save(path, np.array([Bomb(marker)] * 3, dtype=object), allow_pickle=True)
    refused(path, ".npy array")
    path.write_bytes(pickle.dumps(Bomb(marker)))
    refused(path, ".npy array")
    assert not marker.exists()
    pickle.loads(path.read_bytes())
    assert marker.exists()  # the bomb works


def test_damaged_npy_is_refused(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.arange(100, dtype=np.uint16))
    whole = path.read_bytes()
    for size in (0, 5, 9, 60, len(whole) - 1):  # inside the magic, the header length, the header and the data
        path.write_bytes(whole[:size])
        refused(path, ".npy array")
    for old, new in ((b"{'descr'", b"['descr'"), (b"}", b" "), (b"'<u2'", b"'<q2'")):
        assert old in whole
        path.write_bytes(whole.replace(old, new))
        refused(path, ".npy array")
    with open(path, "wb") as file:  # a zip of arrays, which np.load would open by its first bytes
        np.savez(file, np.arange(100))
    refused(path, ".npy array")


@pytest.mark.parametrize("shape", ["(1000000000000,)", "(-1,)", "(4611686018427387904,)"])
def test_npy_that_says_it_is_longer_than_its_file_is_refused(shape, tmp_path):
    header = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(100)
    (tmp_path / "a.npy").write_bytes(content)
    refused(tmp_path / "a.npy", ".npy array")


# ---------------------------------------------------------------------------------------------------------------------
# Vocabulary and entropy
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [4, 1000])
@pytest.mark.parametrize("position", [0, 3, 4, 17, 19])  # 18 and 19 are held out
@pytest.mark.parametrize("name", ["a.npy", "a.bin"])
def test_token_outside_the_vocabulary_is_named(name, position, chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(tokens_module, "CHUNK", chunk)
    tokens = np.full(20, 49, "<u2")
    tokens[position] = 50
    tokens[19] = max(tokens[19], 49 if position == 19 else 61)  # a later, larger one: named in the remedy
    path = tmp_path / name
    np.save(path, tokens) if name == "a.npy" else tokens.tofile(path)
    largest = int(tokens.max())
    refused(path, f"token 50 at position {position} ", "token < 50", f"vocab_size={largest + 1} ", vocab_size=50)
    load_corpus(str(path), largest + 1)


@pytest.mark.parametrize("bad", [50, -1, 2**40])
def test_token_that_the_opening_did_not_see_never_reaches_the_model(bad, tmp_path, monkeypatch):
    monkeypatch.setattr(tokens_module, "CHUNK", 10)
    monkeypatch.setattr(tokens_module, "SAMPLED_CHUNKS", 2)  # the first and the last
    tokens = np.zeros(1000, np.int64)
    tokens[555] = bad
    np.save(tmp_path / "a.npy", tokens)
    batches = Batches(load_corpus(str(tmp_path / "a.npy"), 50), 1, 8, 0)
    num_refused = 0
    for step in range(batches.num_windows[0]):
        try:
            assert not batches[step]["inputs"].any()
        except ConfigError as error:
            num_refused += 1
            assert f"token {bad} at position 555 " in str(error) and "a.npy" in str(error)
    assert num_refused == 1


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_unigram_entropy_in_nats(chunk, monkeypatch):
    monkeypatch.setattr(tokens_module, "CHUNK", chunk)
    for expected, tokens in (
        (math.log(8), np.arange(8, dtype=np.uint8)),
        (0.25 * math.log(4) + 0.75 * math.log(4 / 3), np.array([5, 0, 0, 0], np.uint64)),
        (0, np.full(9, 7)),
        (0, np.zeros(0, np.uint8)),
    ):
        assert unigram_entropy([(held(tokens), 1)]) == pytest.approx(expected)


def test_unigram_entropy_leaves_out_masked_tokens():
    tokens = np.array([0, 1, 2, 3, 3, 3], np.int32)
    half = np.concatenate([tokens_module.masked(np.arange(6)), tokens])
    with_prompt = Tokens([Part(half, "array", 0, len(half), masks=True)], 6)
    assert unigram_entropy([(with_prompt, 1)]) == pytest.approx(unigram_entropy([(held(tokens), 1)]))


def test_unigram_entropy_of_a_mixture_is_of_what_it_draws():
    zeros, ones = held(np.zeros(50, int)), held(np.ones(3, int))
    expected = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    assert unigram_entropy([(zeros, 0.25), (ones, 0.75)]) == pytest.approx(expected)


def test_the_fingerprint_knows_every_held_out_token():
    zeros = held(np.zeros(9, int))
    one, other = (Corpus((Source(zeros, held(np.array([0, last])), ""),)) for last in (1, 2))
    assert one.fingerprint() != other.fingerprint()


# ---------------------------------------------------------------------------------------------------------------------
# Mixtures
# ---------------------------------------------------------------------------------------------------------------------


def test_sources_are_mixed_by_their_weights(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(1000, np.uint16))
    np.full(500, 1, "<u2").tofile(tmp_path / "b.bin")
    corpus = load_corpus(f"{tmp_path}/a.npy=0.75,{tmp_path}/b.bin=0.25", 2)
    assert corpus.shares == [0.75, 0.25]
    assert (corpus.num_train, corpus.num_held_out) == (1350, 150)
    for words in ("0.75 of", "a.npy", "0.25 of", "b.bin"):
        assert words in corpus.about
    assert corpus.unigram_entropy() == pytest.approx(0.25 * math.log(4) + 0.75 * math.log(4 / 3))
    first = np.concatenate([Batches(corpus, 4, 8, 0)[step]["inputs"][:, 0] for step in range(10)])
    assert first.sum() == 10
    assert corpus.fingerprint() != load_corpus(f"{tmp_path}/a.npy=0.5,{tmp_path}/b.bin=0.5", 2).fingerprint()


def test_standard_library_is_split_by_file():
    corpus = load_corpus(None, 256)
    assert "standard library" in corpus.about
    held_out_fraction = corpus.num_held_out / (corpus.num_train + corpus.num_held_out)
    assert 0.02 < held_out_fraction < 0.3

    again = load_corpus(None, 256)
    np.testing.assert_array_equal(train_of(corpus), train_of(again))
    np.testing.assert_array_equal(held_out_of(corpus), held_out_of(again))
    assert corpus.fingerprint() == again.fingerprint()

    train, held_out = documents(train_of(corpus)), documents(held_out_of(corpus))
    assert f"{len(train) + len(held_out)} files" in corpus.about
    assert not {d for d in held_out if len(d) > 1000} & set(train)
    for module in ("dataclasses.py", "json/decoder.py"):
        source = (Path(sysconfig.get_paths()["stdlib"]) / module).read_bytes()
        assert (source in train) + (source in held_out) == 1


def test_text_that_is_not_utf8_is_refused_at_its_offset(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"plain \xff")
    refused(tmp_path / "a.txt", "UTF-8", "0xff at offset 6 ")


def test_folder_split_is_the_same_everywhere(tmp_path):
    """Pinned names: the split may depend on nothing but the relative path."""
    for folder in ("here", "there"):
        files = {f"{i % 3}/{i}.txt": f"{i}".encode() for i in range(60)}
        corpus = load_corpus(str(write_tree(tmp_path / folder, files)), 256)
        train, held_out = documents(train_of(corpus)), documents(held_out_of(corpus))
        assert sorted(train + held_out) == sorted(files.values())
        assert held_out == [b"22", b"35"]


def test_a_dtype_of_tokens_that_nothing_uses_is_refused(tmp_path):
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "t.raw")
    for path in (None, str(tmp_path / "t.raw")):
        with pytest.raises(ConfigError, match="token_dtype=uint16"):
            load_corpus(path, 256, "uint16")


def test_every_training_window_is_looked_at_once(tmp_path):
    np.save(tmp_path / "small.npy", np.random.default_rng(0).integers(0, 256, 360).astype(np.uint16))
    batches = Batches(load_corpus(str(tmp_path / "small.npy"), 256), 4, 32, 0)
    for most, windows in ((64, 10), (7, 7)):
        found = data.first_batches(batches, most)
        assert sum(int((batch["targets"] >= 0).sum()) for batch in found) == windows * 32


def test_a_token_that_begins_and_ends_documents_is_refused_where_they_are_masked():
    tokens = held(np.arange(100) % 7, 7)
    for begins in (None, (3,), (2,)):
        corpus = Corpus((Source(tokens, tokens, "data", end_of_document=2, begin_of_text=begins),))
        if begins == (2,):
            with pytest.raises(ConfigError, match="the token 2"):
                corpus.end_of_document  # noqa: B018
        else:
            assert corpus.end_of_document == 2


def test_odd_bin_is_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"\0" * 7)
    refused(tmp_path / "a.bin", "7 bytes")


@pytest.mark.parametrize("vocab_size", [1000, 70_000])
@pytest.mark.parametrize("dtype", ["<u4", "<i4", "<u2"])
def test_a_bin_that_is_not_plainly_uint16_is_refused_or_said(tmp_path, vocab_size, dtype):
    path, tokens = tmp_path / "a.bin", np.random.default_rng(0).integers(0, 1000, 4000).astype(dtype)
    tokens.tofile(path)
    if dtype == "<u2" and vocab_size == 1000:
        corpus = load_corpus(str(path), vocab_size)
    else:
        with pytest.raises(ConfigError, match="token_dtype"):
            load_corpus(str(path), vocab_size)
        corpus = load_corpus(str(path), vocab_size, {"<u4": "uint32", "<i4": "int32", "<u2": "uint16"}[dtype])
    np.testing.assert_array_equal(corpus.sources[0].train.read(0, 3600), tokens[:3600])


@pytest.mark.parametrize("what", ["llm.c", "idx"])
def test_a_bin_of_another_program_is_refused(tmp_path, what):
    tokens = np.random.default_rng(0).integers(1, 1000, 4000).astype("<u2").tobytes()
    header = np.array([20240520, 1, 4000], "<i4").tobytes().ljust(1024, b"\0")
    (tmp_path / "a.bin").write_bytes(header + tokens if what == "llm.c" else tokens)
    if what == "idx":
        (tmp_path / "a.idx").write_bytes(b"MMIDIDX")
    with pytest.raises(ConfigError, match=what):
        load_corpus(str(tmp_path / "a.bin"), 1000)


@pytest.mark.parametrize(
    "array",
    [np.zeros(9), np.zeros(9, bool), np.zeros(9, "M8[s]"), np.zeros(9, "U3"), np.zeros((3, 3), int), np.array(7)],
    ids=lambda array: f"{array.dtype}-{array.ndim}d",
)
def test_npy_that_is_not_1d_integers_is_refused(array, tmp_path):
    np.save(tmp_path / "a.npy", array)
    refused(tmp_path / "a.npy", "1-D integer", str(array.dtype))


def test_negative_token_is_refused_without_blaming_the_vocabulary(tmp_path):
    np.save(tmp_path / "a.npy", np.array([1, 2, -100, 3]))
    refused(tmp_path / "a.npy", "token -100 at position 2 ", "Negative tokens")


def test_uint64_token_beyond_int64_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.array([1, 2**64 - 1], np.uint64))
    refused(tmp_path / "a.npy", f"token {2**64 - 1} at position 1 ")


def test_a_file_that_is_there_is_one_source_whatever_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse_sources("a=1,b=3") == [("a", 1), ("b", 3)] and parse_sources("c") == [("c", 1)]
    (tmp_path / "a=1,b=3").touch()
    assert parse_sources("a=1,b=3") == [("a=1,b=3", 1)]


@pytest.mark.parametrize("text", ["a=", "=1", "a=0", "a=-1", "a=x", "a=1/0", "a=1,b", "a=nan", "a=inf", "a=1,,b=1"])
def test_bad_mixture_is_refused(text):
    with pytest.raises(ConfigError, match="PATH=WEIGHT"):
        load_corpus(text, 256)


def test_weights_of_a_long_pattern_are_refused():
    for weights, period in (([0.5, 0.5], 2), ([7, 3], 10), ([1], 1), (["0.3333", "0.6667"], 10_000)):
        assert make_mixture([Fraction(w) for w in weights]).period == period
    with pytest.raises(ConfigError, match="100,000"):
        make_mixture([Fraction("0.33333"), Fraction("0.66667")])
