"""Files of safetensors: what is damaged or foreign is refused by file and tensor; what we write is what they write."""

import json
import random
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxdist.checkpoint import safetensors
from jaxdist.checkpoint.safetensors import DTYPES, FILE, INDEX, BadWeights, header_text, open_folder, read_header

TENSORS = {"a": ("F32", (2, 3)), "b": ("BF16", (4,)), "empty": ("F32", (0, 7)), "scalar": ("I64", ())}


def write(path: Path, header: dict | str | bytes, data: bytes = b"", length: int | None = None) -> Path:
    text = json.dumps(header) if isinstance(header, dict) else header
    text = text.encode() if isinstance(text, str) else text
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


GOOD = {"x": entry(), "y": entry("U8", (3,), (8, 11))}


def test_a_good_file_is_read(tmp_path):
    write(tmp_path / FILE, GOOD, np.array([1, 2], "<f4").tobytes() + b"abc")
    folder = open_folder(tmp_path)
    assert folder.index is None and folder.tensors["x"].map().tolist() == [1, 2]
    assert folder.tensors["y"].map().tobytes() == b"abc"


@pytest.mark.parametrize(
    "header, said",
    [
        (b"\xff\xfe{}", "its header cannot be read"),
        ("{", "no JSON"),
        ('{"x": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}, "x": 1}', "has 'x' twice"),
        ({"x": 3}, "tensor x is not described"),
        ({"x": entry("F12")}, "tensor x is of an unknown dtype 'F12'"),
        ({"x": entry(shape=(-2,))}, "tensor x has no shape"),
        ({"x": entry(shape=(2**64,))}, "tensor x has no shape"),
        ({"x": entry(offsets=(0, 8, 9))}, "tensor x has no shape"),
        ({"x": entry(offsets=(0, 7))}, r"tensor x has 7 bytes, and F32 \[2\] takes 8"),
        ({"x": entry(), "y": entry(offsets=(8, 16))}, "tensor y ends at byte .* truncated"),
        ({"x": entry(), "y": entry("U8", (3,), (7, 10))}, "tensor y overlaps"),
        ({"x": entry(), "y": entry("U8", (2,), (9, 11))}, "tensor y comes after a hole"),
        ({}, "its tensors end at byte"),
    ],
)
def test_a_bad_header_is_refused_by_file_and_tensor(tmp_path, header, said):
    path = write(tmp_path / FILE, header, bytes(11))
    with pytest.raises(BadWeights, match=said) as error:
        open_folder(tmp_path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("size", [0, 5, 8, 40, -1])
def test_a_truncated_file_is_refused(tmp_path, size):
    path = write(tmp_path / FILE, GOOD, bytes(11))
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(BadWeights, match="truncated"):
        read_header(path)


# ---- the index ----


def index_of(folder: Path, places: dict, text: str | None = None) -> Path:
    for file, name in (("1.safetensors", "x"), ("2.safetensors", "y")):
        write(folder / file, {name: entry()}, bytes(8))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}) if text is None else text)
    return folder


PLACES = {"x": "1.safetensors", "y": "2.safetensors"}


@pytest.mark.parametrize(
    "places, said",
    [
        (PLACES | {"y": "/etc/passwd"}, "it names '/etc/passwd', which is not a file beside it"),
        (PLACES | {"y": "sub\\2.safetensors"}, "which is not a file beside it"),
        (PLACES | {"y": "3.safetensors"}, "3.safetensors: its header cannot be read"),
        (PLACES | {"y": 3}, "not a whole index"),
        ({"x": "2.safetensors", "y": "2.safetensors"}, "tensor x is in it, and it is not: no file of the index"),
        ({"x": "2.safetensors", "y": "1.safetensors"}, r"tensor x is in it, and it is not: 1.safetensors holds it"),
        (PLACES | {"z": "1.safetensors"}, "tensor z is in it, and it is not"),
    ],
)
def test_a_bad_index_is_refused(tmp_path, places, said):
    with pytest.raises(BadWeights, match=said):
        open_folder(index_of(tmp_path, places))


def test_a_tensor_that_the_index_does_not_name_or_two_files_hold(tmp_path):
    index_of(tmp_path, PLACES)
    write(tmp_path / "2.safetensors", {"y": entry(), "z": entry("U8", (1,), (8, 9))}, bytes(9))
    with pytest.raises(BadWeights, match="does not name its tensor z"):
        open_folder(tmp_path)
    write(tmp_path / "2.safetensors", {"y": entry(), "x": entry(offsets=(8, 16))}, bytes(16))
    with pytest.raises(BadWeights, match=r"tensor x is in 1\.safetensors too"):
        open_folder(tmp_path)


# ---- writing ----


def test_a_file_is_what_the_library_writes(tmp_path):
    theirs = pytest.importorskip("safetensors.numpy", reason="pip install -e '.[oracle]'")
    rng = np.random.default_rng(0)
    for count, metadata in ((1, None), (5, {"format": "pt"}), (9, {"é": '"\\\n'})):
        arrays = {f"t{n}.é": rng.normal(size=(n, 3)).astype(["f4", "f2", "i8", "f8"][n % 4]) for n in range(count)}
        path = tmp_path / f"{count}.safetensors"
        theirs.save_file(arrays, path, metadata)
        text, found = read_header(path)
        assert text == header_text({name: (s.dtype, s.shape) for name, s in found.items()}, metadata)
        safetensors.allocate(tmp_path / "ours", text)
        for name, stored in read_header(tmp_path / "ours")[1].items():
            if stored.map().size:
                stored.map("r+")[...] = arrays[name]
        assert (tmp_path / "ours").read_bytes() == path.read_bytes()
        (tmp_path / "ours").unlink()


def test_the_dtypes_are_the_library_s(tmp_path):
    for name, dtype in DTYPES.items():
        write(tmp_path / FILE, {"x": entry(name, (2,), (0, 2 * dtype.itemsize))}, bytes(2 * dtype.itemsize))
        assert read_header(tmp_path / FILE)[1]["x"].map().dtype == dtype
    assert DTYPES["BF16"] == ml_dtypes.bfloat16


def test_a_map_is_written_where_it_is_indexed(tmp_path):
    safetensors.allocate(tmp_path / FILE, header_text(TENSORS))
    stored = read_header(tmp_path / FILE)[1]
    stored["a"].map("r+").transpose(1, 0)[1:] = 7
    assert stored["a"].map().tolist() == [[0, 7, 7], [0, 7, 7]] and not stored["b"].map().any()
    with pytest.raises(FileExistsError):
        safetensors.allocate(tmp_path / FILE, header_text(TENSORS))


def test_tensors_are_split_into_files_in_their_order():
    tensors = {name: ("U8", (size,)) for name, size in (("a", 4), ("b", 5), ("c", 20), ("d", 1), ("e", 1))}
    groups = safetensors.split_into_files(tensors, 10)
    assert groups == [["a", "b"], ["c"], ["d", "e"]]
    assert safetensors.names_of_files(1) == [FILE]
    assert safetensors.names_of_files(2)[1] == "model-00002-of-00002.safetensors"


@pytest.mark.parametrize("length", [2**63, 100_000_001, 10**6])
def test_a_header_that_is_too_long_is_refused_before_it_is_read(tmp_path, length):
    path = write(tmp_path / FILE, GOOD, bytes(11), length)
    with pytest.raises(BadWeights, match=f"its header is to have {length:,} bytes"):
        read_header(path)


def test_no_file_and_no_regular_file(tmp_path):
    with pytest.raises(BadWeights, match="No such file"):
        open_folder(tmp_path)
    (tmp_path / FILE).mkdir()
    with pytest.raises(BadWeights, match="cannot be read"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    "text", ["", '{"weight_map": {"x": "1.safe', "{}", '{"weight_map": {"x": "1", "x": "2"}}', "[" * 9999]
)
def test_an_index_that_is_not_whole_is_refused(tmp_path, text):
    with pytest.raises(BadWeights, match="not a whole index"):
        open_folder(index_of(tmp_path, PLACES, text))


def test_whatever_the_bytes_only_one_error_comes_out(tmp_path):
    """A good folder with a few bytes changed, cut or put in."""
    good = index_of(tmp_path, PLACES)
    contents = {path: path.read_bytes() for path in good.iterdir()}
    chance = random.Random(0)
    refused = 0
    for _ in range(1500):
        path = chance.choice(sorted(contents))
        damaged = bytearray(contents[path])
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(damaged) + 1)
            damaged[at : at + chance.randint(0, 3)] = chance.choice(
                (b"", b"9", b"}", b'"', b"-", bytes([chance.randrange(256)]))
            )
        path.write_bytes(damaged)
        try:
            open_folder(good)
        except BadWeights as error:
            refused += 1
            assert str(good) in str(error)
        path.write_bytes(contents[path])
    assert refused > 1000
