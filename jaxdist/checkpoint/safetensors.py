"""Files of safetensors: their headers, checked to the byte, and mapped memory of which only what is used is read.

A file is 8 bytes with the header's length, the header (JSON: name -> dtype, shape, data_offsets) and the bytes of the
tensors, one after another with no hole. A folder has one file, or several and an index that says which tensor is where.
Source: https://github.com/huggingface/safetensors.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import ml_dtypes
import numpy as np

from jaxdist.errors import ConfigError, reason_of
from jaxdist.files import read_regular

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # of the safetensors library
MAX_INDEX_BYTES = 2**28
METADATA = "__metadata__"
LENGTH_BYTES = 8
ALIGNMENT = 8  # of the tensors' start: the library fills the header up with spaces

# In the library's order, in which it writes tensors: the last first, those of one dtype by name.
DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "F32": np.dtype(np.float32),
    "C64": np.dtype(np.complex64),
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
FLOATS = ("F16", "BF16", "F32", "F64")


class BadWeights(ConfigError):
    """A file of weights that is damaged or not what it says; nothing of it was used."""


@dataclass(frozen=True)
class Stored:
    """Where a tensor's bytes are: a file, and the first of them in it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    def map(self, mode: Literal["r", "r+"] = "r") -> np.ndarray:
        """Its memory, mapped: [*shape]. Bytes are read, or with mode "r+" written, where elements are touched."""
        size = math.prod(self.shape)
        if not size:
            return np.zeros(self.shape, DTYPES[self.dtype])
        little = DTYPES[self.dtype] if self.dtype == "BF16" else DTYPES[self.dtype].newbyteorder("<")
        return np.memmap(self.file, little, mode, self.start, (size,)).reshape(self.shape)


# ---------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Folder:
    """What a folder holds. headers: of each file, as written, by name. index: the text of the index, None for none."""

    path: Path
    tensors: dict[str, Stored]
    headers: dict[str, str]
    index: str | None


def open_folder(path: Path | str) -> Folder:
    """Read every header in a folder. Raises: BadWeights naming the file, and the tensor, that is wrong."""
    path = Path(path)
    index_path = path / INDEX
    if not os.path.lexists(index_path):
        text, tensors = read_header(path / FILE)
        return Folder(path, tensors, {FILE: text}, None)
    try:
        text = read_regular(index_path, MAX_INDEX_BYTES).decode()
        index = parse(text)
        places = index["weight_map"]
        files = sorted(set(places.values()))
        parts = [PurePosixPath(file) for file in files]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        said = "it has no weight_map of names" if isinstance(error, TypeError | KeyError | AttributeError) else error
        said = reason_of(said) if isinstance(said, BaseException) else said
        raise _bad(index_path, f"it is not a whole index ({said})") from error
    if FILE not in files and os.path.lexists(path / FILE):
        both = f"must hold one set of weights, and holds two: {FILE} and the files that {INDEX} names"
        raise ConfigError(f"the weights in {path}", both, "Remove one of them")
    for file, part in zip(files, parts, strict=True):
        if part.is_absolute() or len(part.parts) != 1 or ".." in part.parts or "\\" in file or "\0" in file:
            raise _bad(index_path, f"it names {file!r}, which is not a file beside it")
    headers, tensors = {}, {}
    owner: dict[str, str] = {}
    for file in files:
        headers[file], found = read_header(path / file)
        for name, stored in found.items():
            if name in tensors:
                raise _bad(path / file, f"tensor {name} is in {owner[name]} too")
            tensors[name], owner[name] = stored, file
    for name, file in places.items():
        if owner.get(name) != file:
            there = f"{owner[name]} holds it" if name in owner else "no file of the index holds it"
            raise _bad(path / file, f"the index says that tensor {name} is in it, and it is not: {there}")
    for name in tensors.keys() - places.keys():
        raise _bad(path / owner[name], f"the index does not name its tensor {name}")
    return Folder(path, tensors, headers, text)


def read_header(path: Path) -> tuple[str, dict[str, Stored]]:
    """(the header as it is written, its tensors). Raises: BadWeights."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            size = os.fstat(descriptor).st_size
            start = file.read(LENGTH_BYTES)
            length = int.from_bytes(start, "little")
            if len(start) < LENGTH_BYTES or length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
                most = f"of at most {MAX_HEADER_BYTES:,}"
                raise _bad(
                    path, f"its header is to have {length:,} bytes {most}, and the file has {size:,}: truncated?"
                )
            text = file.read(length).decode()
    except (OSError, ValueError) as error:
        if isinstance(error, BadWeights):
            raise
        raise _bad(path, f"its header cannot be read ({reason_of(error)})") from error
    return text, checked_header(path, text, size)


def checked_header(path: Path, text: str, size: int) -> dict[str, Stored]:
    """The tensors that a header describes, of a file of `size` bytes. Raises: BadWeights."""
    try:
        header = parse(text)
        if not text.startswith("{"):
            raise ValueError("it does not begin with {")
        items = {name: entry for name, entry in header.items() if name != METADATA}
    except (ValueError, AttributeError, RecursionError) as error:
        raise _bad(path, f"its header is no JSON of tensors ({reason_of(error)})") from error
    metadata = header.get(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _bad(path, f"{METADATA} of its header is not a text under each name")
    begin, tensors, spans = LENGTH_BYTES + len(text.encode()), {}, []
    for name, entry in items.items():
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise _bad(path, f"tensor {name} is not described by dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise _bad(path, f"tensor {name} is of an unknown dtype {dtype!r}")
        if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
            raise _bad(path, f"tensor {name} has no shape and two offsets of whole numbers")
        needed = math.prod(shape) * DTYPES[dtype].itemsize
        if offsets[1] - offsets[0] != needed:
            raise _bad(
                path, f"tensor {name} has {offsets[1] - offsets[0]:,} bytes, and {dtype} {shape} takes {needed:,}"
            )
        if begin + offsets[1] > size:
            raise _bad(path, f"tensor {name} ends at byte {begin + offsets[1]:,}, and the file at {size:,}: truncated?")
        tensors[name] = Stored(path, dtype, tuple(shape), begin + offsets[0])
        spans.append((*offsets, name))
    reached = 0
    for first, last, name in sorted(spans):
        if first != reached:
            kind = "overlaps the tensor before it" if first < reached else "comes after a hole"
            raise _bad(
                path, f"tensor {name} {kind}: it begins at {first:,} of the data, and the others end at {reached:,}"
            )
        reached = last
    if begin + reached != size:
        raise _bad(path, f"its tensors end at byte {begin + reached:,}, and the file at {size:,}")
    return tensors


def _are_sizes(value) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def parse(text: str):
    """JSON in which no name is given twice. Raises: ValueError."""

    def unique(pairs: list[tuple]) -> dict:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"it has {next(name for name in names if names.count(name) > 1)!r} twice")
        return found

    return json.loads(text, object_pairs_hook=unique)


def _bad(path: Path, reason: str) -> BadWeights:
    return BadWeights(f"weights in {path}", reason, "Fetch the file again, or use another")


# ---------------------------------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------------------------------


def header_text(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None) -> str:
    """The header of name -> (dtype, shape) as the safetensors library writes it, filled up with spaces."""
    order = list(DTYPES)
    names = sorted(tensors, key=lambda name: (-order.index(tensors[name][0]), name.encode()))
    header: dict = {} if metadata is None else {METADATA: dict(metadata)}
    end = 0
    for name in names:
        dtype, shape = tensors[name]
        begin, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":"))
    return text + " " * (-len(text.encode()) % ALIGNMENT)


def allocate(path: Path, text: str) -> None:
    """Make a file with this header, and zeros for its tensors.

    Its blocks are reserved: on a full disk this raises an OSError, where writing to mapped memory would be a SIGBUS.
    """
    header = text.encode()
    with open(path, "xb") as file:
        file.write(len(header).to_bytes(LENGTH_BYTES, "little") + header)
        file.flush()
        os.posix_fallocate(file.fileno(), 0, LENGTH_BYTES + len(header) + data_bytes(text))


def data_bytes(text: str) -> int:
    """Bytes of all tensors of a header that this module wrote or has checked."""
    return max((e["data_offsets"][1] for name, e in parse(text).items() if name != METADATA), default=0)


def split_into_files(tensors: Mapping[str, tuple[str, tuple[int, ...]]], most: int) -> list[list[str]]:
    """Names, in their order, for files of at most `most` bytes each; a larger tensor has its own."""
    files: list[list[str]] = [[]]
    filled = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * DTYPES[dtype].itemsize
        if files[-1] and filled + size > most:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    return files


def names_of_files(count: int) -> list[str]:
    if count == 1:
        return [FILE]
    stem, ending = FILE.split(".")
    return [f"{stem}-{n:05d}-of-{count:05d}.{ending}" for n in range(1, count + 1)]


def index_text(files: Mapping[str, Iterable[str]], num_bytes: int) -> str:
    """The index of file -> names of its tensors, as transformers writes it."""
    places = {name: file for file, names in files.items() for name in names}
    content = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(places.items()))}
    return json.dumps(content, indent=2) + "\n"
