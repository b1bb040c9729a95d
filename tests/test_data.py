"""The tokens of every kind of input, every input that must be refused, and the order of the data."""

import math
import os
import pickle
import sysconfig
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist import data
from jaxdist.data import Batches, load_corpus, unigram_entropy
from jaxdist.errors import ConfigError


def write_tree(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def documents(tokens: np.ndarray) -> list[bytes]:
    return tokens.tobytes().split(b"\0")


def refused(path, *expected: str, vocab_size: int = 256) -> None:
    """Loading fails with a ConfigError that names the file and says each of `expected`."""
    with pytest.raises(ConfigError) as caught:
        load_corpus(str(path), vocab_size)
    for words in (str(path), *expected):
        assert words in str(caught.value)


# ---------------------------------------------------------------------------------------------------------------------
# Standard library
# ---------------------------------------------------------------------------------------------------------------------


def test_standard_library_is_split_by_file():
    corpus = load_corpus(None, 256)
    assert "standard library" in corpus.source
    assert corpus.train.dtype == corpus.held_out.dtype == np.uint8
    held_out_fraction = len(corpus.held_out) / (len(corpus.train) + len(corpus.held_out))
    assert 0.02 < held_out_fraction < 0.3

    again = load_corpus(None, 256)
    np.testing.assert_array_equal(corpus.train, again.train)
    np.testing.assert_array_equal(corpus.held_out, again.held_out)

    train, held_out = documents(corpus.train), documents(corpus.held_out)
    assert f"{len(train) + len(held_out)} files" in corpus.source
    assert not {d for d in held_out if len(d) > 1000} & set(train)
    for module in ("dataclasses.py", "json/decoder.py"):
        source = (Path(sysconfig.get_paths()["stdlib"]) / module).read_bytes()
        assert (source in train) + (source in held_out) == 1


def test_standard_library_leaves_out_installed_packages_and_tests(tmp_path, monkeypatch):
    skipped = ["site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "turtledemo"]
    write_tree(
        tmp_path,
        {"b.py": b"b", "a/z.py": b"a/z", "a.py": b"a", "empty.py": b"", "note.txt": b"text"}
        | {f"{name}/x.py": b"skipped" for name in skipped}
        | {f"a/{name}/x.py": b"skipped" for name in skipped},
    )
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    monkeypatch.setattr(data, "_is_held_out", lambda name: name == "b.py")
    corpus = load_corpus(None, 256)
    assert documents(corpus.train) == [b"a", b"a/z"]  # sorted as text: "a.py" < "a/z.py"
    assert documents(corpus.held_out) == [b"b"]
    assert "3 files" in corpus.source


@pytest.mark.parametrize("stdlib", [".", "python311.zip", "missing"])
def test_distribution_without_source_is_told_to_pass_data(stdlib, tmp_path, monkeypatch):
    write_tree(tmp_path, {"os.pyc": b"\x00", "python311.zip": b"PK"})
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / stdlib)})
    with pytest.raises(ConfigError, match="Pass --data"):
        load_corpus(None, 256)


# ---------------------------------------------------------------------------------------------------------------------
# Text
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 9, 10, 1009])
def test_text_file_holds_out_its_last_tenth(size, tmp_path):
    text = bytes(32 + i % 90 for i in range(size))
    (tmp_path / "a.txt").write_bytes(text)
    corpus = load_corpus(str(tmp_path / "a.txt"), 256)
    assert corpus.train.dtype == np.uint8
    assert corpus.train.tobytes() + corpus.held_out.tobytes() == text
    assert len(corpus.held_out) == math.ceil(size / 10)
    assert str(tmp_path / "a.txt") in corpus.source


def test_text_tokens_are_bytes(tmp_path):
    (tmp_path / "a").write_text("é" * 10, encoding="utf-8")
    corpus = load_corpus(str(tmp_path / "a"), 256)
    np.testing.assert_array_equal(corpus.train, [0xC3, 0xA9] * 9)
    np.testing.assert_array_equal(corpus.held_out, [0xC3, 0xA9])


def test_empty_file_is_refused(tmp_path):
    for name in ("a.txt", "a.bin"):
        (tmp_path / name).write_bytes(b"")
        refused(tmp_path / name, "empty")
    np.save(tmp_path / "a.npy", np.zeros(0, np.uint16))
    refused(tmp_path / "a.npy", "empty")


def test_text_that_is_not_utf8_is_refused_at_its_offset(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"plain \xff")
    refused(tmp_path / "a.txt", "UTF-8", "0xff at offset 6 ")


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
    monkeypatch.setattr(data, "_is_held_out", lambda name: name in ("b.md", "sub/deep/c"))
    corpus = load_corpus(str(tmp_path), 256)
    assert documents(corpus.train) == [b"a", b"d"]
    assert documents(corpus.held_out) == [b"b", b"c"]
    assert "4 files" in corpus.source


def test_folder_split_is_the_same_everywhere(tmp_path):
    """Pinned names: the split may depend on nothing but the relative path."""
    for folder in ("here", "there"):
        files = {f"{i % 3}/{i}.txt": f"{i}".encode() for i in range(60)}
        corpus = load_corpus(str(write_tree(tmp_path / folder, files)), 256)
        train, held_out = documents(corpus.train), documents(corpus.held_out)
        assert sorted(train + held_out) == sorted(files.values())
        assert held_out == [b"22", b"35"]


def test_folder_where_the_hash_leaves_a_side_empty_holds_out_its_last_file(tmp_path, monkeypatch):
    write_tree(tmp_path, {"a": b"a", "b": b"b", "c": b"c"})
    for everything in (False, True):
        monkeypatch.setattr(data, "_is_held_out", lambda name, everything=everything: everything)
        corpus = load_corpus(str(tmp_path), 256)
        assert documents(corpus.train) == [b"a", b"b"]
        assert documents(corpus.held_out) == [b"c"]


def test_folder_of_one_file_holds_out_its_last_tenth(tmp_path):
    write_tree(tmp_path, {"only": b"0123456789" * 2, "empty": b""})
    corpus = load_corpus(str(tmp_path), 256)
    assert corpus.train.tobytes() == b"012345678901234567"
    assert corpus.held_out.tobytes() == b"89"


def test_folder_with_a_file_that_is_not_utf8_is_refused_by_its_name(tmp_path):
    write_tree(tmp_path, {"good.txt": b"good", "sub/bad.txt": b"ab\xc3"})
    refused(tmp_path, str(tmp_path / "sub" / "bad.txt"), "UTF-8", "offset 2 ")


@pytest.mark.parametrize("files", [{}, {".hidden": b"x"}, {"empty": b""}])
def test_folder_without_text_is_refused(files, tmp_path):
    refused(write_tree(tmp_path, files), "no text")


# ---------------------------------------------------------------------------------------------------------------------
# Token files
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "i4", "i8", "u8"])
def test_npy_is_memory_mapped_in_its_own_dtype(dtype, tmp_path):
    tokens = (np.arange(1009) % 251).astype(dtype)
    np.save(tmp_path / "a.npy", tokens)
    corpus = load_corpus(str(tmp_path / "a.npy"), 251)
    for part, expected in ((corpus.train, tokens[:908]), (corpus.held_out, tokens[908:])):
        assert isinstance(part, np.memmap) and part.mode == "r"
        assert part.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(part, expected)
    assert unigram_entropy(corpus.train) == pytest.approx(unigram_entropy(tokens[:908].astype(int)))


def test_bin_is_memory_mapped_little_endian_uint16(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes([1, 2] * 9 + [3, 0]))
    corpus = load_corpus(str(tmp_path / "a.bin"), 514)
    assert isinstance(corpus.train, np.memmap) and isinstance(corpus.held_out, np.memmap)
    np.testing.assert_array_equal(corpus.train, [0x0201] * 9)
    np.testing.assert_array_equal(corpus.held_out, [3])


def test_memory_map_is_never_loaded_whole(tmp_path):
    num_tokens = 24_000_000
    with open(tmp_path / "a.bin", "wb") as file:
        file.truncate(2 * num_tokens)  # a sparse file of zeros
    tracemalloc.start()
    corpus = load_corpus(str(tmp_path / "a.bin"), 1)
    assert unigram_entropy(corpus.train) == 0
    Batches(corpus.train, 2, 8, None)[0]
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < num_tokens


def test_odd_bin_is_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"\0" * 7)
    refused(tmp_path / "a.bin", "uint16", "7 bytes")


@pytest.mark.parametrize(
    "array",
    [np.zeros(9), np.zeros(9, bool), np.zeros(9, "M8[s]"), np.zeros(9, "U3"), np.zeros((3, 3), int), np.array(7)],
    ids=lambda array: f"{array.dtype}-{array.ndim}d",
)
def test_npy_that_is_not_1d_integers_is_refused(array, tmp_path):
    np.save(tmp_path / "a.npy", array)
    refused(tmp_path / "a.npy", "1-D integer", str(array.dtype))


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


# ---------------------------------------------------------------------------------------------------------------------
# Paths
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["missing", "missing.npy", "missing.bin", "a.txt/b", "x" * 300])
def test_missing_path_is_refused(name, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"text")
    refused(tmp_path / name, "cannot be read")


def test_empty_path_is_not_the_current_folder():
    refused("", "cannot be read")


def test_path_that_is_neither_file_nor_folder_is_refused():
    refused(os.devnull, "neither a regular file nor a folder")


@pytest.mark.parametrize("name", ["a.txt", "a.npy", "a.bin", "folder"])
def test_unreadable_path_is_refused(name, tmp_path, monkeypatch):
    """Root may read everything, so the refusal is planted where the operating system would make it."""
    path = write_tree(tmp_path, {"folder/a" if name == "folder" else name: b"text"}) / name

    def deny(denied, *_args, **_kwargs):
        raise PermissionError(13, "Permission denied", str(denied))

    monkeypatch.setattr(Path, "read_bytes", deny)
    monkeypatch.setattr(np, "memmap", deny)
    monkeypatch.setattr(np.lib.format, "open_memmap", deny)
    refused(path, "cannot be read", "Permission denied")


def test_folder_that_cannot_be_listed_is_refused(tmp_path, monkeypatch):
    write_tree(tmp_path, {"a": b"a", "private/b": b"b"})
    scandir = os.scandir

    def deny(folder):
        if str(folder).endswith("private"):
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", deny)
    refused(tmp_path, str(tmp_path / "private"), "Permission denied")


# ---------------------------------------------------------------------------------------------------------------------
# Vocabulary and entropy
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [4, 1000])
@pytest.mark.parametrize("position", [0, 3, 4, 17, 19])  # 18 and 19 are held out
@pytest.mark.parametrize("name", ["a.npy", "a.bin"])
def test_token_outside_the_vocabulary_is_named(name, position, chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_CHUNK", chunk)
    tokens = np.full(20, 49, "<u2")
    tokens[position] = 50
    tokens[19] = max(tokens[19], 49 if position == 19 else 61)  # a later, larger one: named in the remedy
    path = tmp_path / name
    np.save(path, tokens) if name == "a.npy" else tokens.tofile(path)
    largest = int(tokens.max())
    refused(path, f"token 50 at position {position} ", "of 50", f"--vocab-size {largest + 1} ", vocab_size=50)
    load_corpus(str(path), largest + 1)


def test_negative_token_is_refused_without_blaming_the_vocabulary(tmp_path):
    np.save(tmp_path / "a.npy", np.array([1, 2, -100, 3]))
    refused(tmp_path / "a.npy", "token -100 at position 2 ", "Negative tokens")


def test_uint64_token_beyond_int64_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.array([1, 2**64 - 1], np.uint64))
    refused(tmp_path / "a.npy", f"token {2**64 - 1} at position 1 ")


def test_text_needs_only_the_byte_values_it_uses(tmp_path):
    write_tree(tmp_path, {"a.txt": b"abcdefghij", "folder/a.txt": b"aaa", "folder/b.txt": b"abj"})
    for path in (tmp_path / "a.txt", tmp_path / "folder"):
        load_corpus(str(path), ord("j") + 1)
    refused(tmp_path / "a.txt", "token 106 at position 9 ", "--vocab-size 256 ", vocab_size=ord("j"))
    with pytest.raises(ConfigError, match=r"b\.txt.*token 106 at position 2 "):
        load_corpus(str(tmp_path / "folder"), ord("j"))


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_unigram_entropy_in_nats(chunk, monkeypatch):
    monkeypatch.setattr(data, "_CHUNK", chunk)
    assert unigram_entropy(np.arange(8, dtype=np.uint8)) == pytest.approx(math.log(8))
    assert unigram_entropy(np.array([5, 0, 0, 0], np.uint64)) == pytest.approx(
        0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    )
    assert unigram_entropy(np.full(9, 7)) == 0
    assert unigram_entropy(np.zeros(0, np.uint8)) == 0


# ---------------------------------------------------------------------------------------------------------------------
# Batches
# ---------------------------------------------------------------------------------------------------------------------


def visits(batches: Batches, num_epochs: int) -> list[int]:
    """The windows visited, in order: with tokens = arange, the first input of a row tells its window."""
    num_steps = -(-num_epochs * batches.num_windows // batches.batch_size)
    starts = np.concatenate([batches[step]["inputs"][:, 0] for step in range(num_steps)])
    assert not (starts % batches.seq_len).any()
    return (starts // batches.seq_len).tolist()[: num_epochs * batches.num_windows]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_each_epoch_visits_each_window_once(draw):
    seq_len = draw.draw(st.integers(1, 9), "seq_len")
    num_windows = draw.draw(st.integers(1, 40), "num_windows")
    num_tokens = num_windows * seq_len + 1 + draw.draw(st.integers(0, seq_len - 1), "left over")
    batch_size = draw.draw(st.integers(1, num_windows), "batch_size")
    seed = draw.draw(st.none() | st.integers(0, 2**70), "seed")
    batches = Batches(np.arange(num_tokens), batch_size, seq_len, seed)
    assert batches.num_windows == num_windows
    order = visits(batches, num_epochs=3)
    for epoch in range(3):
        windows = order[epoch * num_windows : (epoch + 1) * num_windows]
        assert sorted(windows) == list(range(num_windows))
        if seed is None:
            assert windows == list(range(num_windows))


@pytest.mark.parametrize("seed", [None, 0, 7])
def test_batch_holds_shifted_windows(seed):
    batch_size, seq_len = 3, 5
    tokens = np.random.default_rng(0).integers(0, 1000, 7 * seq_len + 1).astype(np.uint16)
    windows = {tuple(tokens[start : start + seq_len + 1]) for start in range(0, len(tokens) - 1, seq_len)}
    batches = Batches(tokens, batch_size, seq_len, seed)
    for step in range(8):
        batch = batches[step]
        assert {name: (array.dtype, array.shape) for name, array in batch.items()} == {
            "inputs": (np.int32, (batch_size, seq_len)),
            "targets": (np.int32, (batch_size, seq_len)),
            "rows": (np.int32, (batch_size,)),
        }
        np.testing.assert_array_equal(batch["targets"][:, :-1], batch["inputs"][:, 1:])
        np.testing.assert_array_equal(batch["rows"], range(batch_size))
        rows = np.concatenate([batch["inputs"], batch["targets"][:, -1:]], axis=1)
        assert {tuple(row) for row in rows} <= windows


def test_batch_of_a_memory_map_is_a_plain_array(tmp_path):
    tokens = np.arange(101, dtype="<u2")
    tokens.tofile(tmp_path / "a.bin")
    mapped = Batches(np.memmap(tmp_path / "a.bin", "<u2", mode="r"), 4, 5, 0)[1]
    for name, array in Batches(tokens, 4, 5, 0)[1].items():
        assert type(mapped[name]) is np.ndarray
        np.testing.assert_array_equal(mapped[name], array)


def test_order_depends_on_seed_and_epoch_alone():
    tokens = np.arange(501)
    first = visits(Batches(tokens, 4, 5, seed=1), num_epochs=2)
    data._permutation.cache_clear()
    assert first == visits(Batches(tokens.copy(), 4, 5, seed=1), num_epochs=2)
    assert first == visits(Batches(tokens, 7, 5, seed=1), num_epochs=2)  # sample order is free of the batch size
    assert first != visits(Batches(tokens, 4, 5, seed=2), num_epochs=2)
    assert first[:100] != first[100:]
    assert first[:100] != list(range(100))


def test_any_step_can_be_asked_for_first():
    """Resuming at a step gives what a run from the start gets there."""
    tokens = np.arange(56)
    from_start = [Batches(tokens, 4, 5, seed=3)[step] for step in range(12)]
    for step in reversed(range(12)):
        data._permutation.cache_clear()
        for name, array in Batches(tokens, 4, 5, seed=3)[step].items():
            np.testing.assert_array_equal(array, from_start[step][name], err_msg=f"{name} of step {step}")


def test_order_is_pinned():
    """A change here changes the data of every resumed run."""
    assert visits(Batches(np.arange(11), 5, 1, seed=0), num_epochs=2) == [
        8,
        0,
        3,
        7,
        6,
        4,
        1,
        5,
        2,
        9,
        1,
        5,
        6,
        4,
        8,
        7,
        9,
        3,
        2,
        0,
    ]


def test_far_step_does_not_overflow():
    step = 2**40
    order = Batches(np.arange(8), 3, 1, seed=None)[step]["inputs"][:, 0]
    np.testing.assert_array_equal(order, [(step * 3 + row) % 7 for row in range(3)])


def test_negative_step_is_an_index_error():
    with pytest.raises(IndexError, match="-1"):
        Batches(np.arange(11), 2, 1, seed=0)[-1]


def test_too_short_corpus_says_what_would_work():
    with pytest.raises(ConfigError) as caught:
        Batches(np.arange(512), 8, 64, seed=0)
    for words in ("there are 512", "needs 513", "--batch-size 7 ", "--seq-len 63 ", "more data"):
        assert words in str(caught.value)
    Batches(np.arange(513), 8, 64, seed=0)
    Batches(np.arange(512), 7, 64, seed=0)
    Batches(np.arange(512), 8, 63, seed=0)


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_corpus_too_short_for_any_batch_asks_for_data(num_tokens):
    with pytest.raises(ConfigError, match=r"Use more data\.$"):
        Batches(np.arange(num_tokens), 1, 1, seed=None)


@pytest.mark.parametrize(
    ("batch_size", "seq_len", "seed", "flag"), [(0, 4, 0, "--batch-size"), (2, 0, 0, "--seq-len"), (2, 4, -1, "--seed")]
)
def test_impossible_sizes_and_seeds_are_refused(batch_size, seq_len, seed, flag):
    with pytest.raises(ConfigError, match=flag):
        Batches(np.arange(100), batch_size, seq_len, seed)
