"""Long sequences of tokens that stay where they are: in files mapped into memory, or in the bytes of a text.

Nothing here reads a mapped file whole, and no token leaves without having been checked against the vocabulary.
"""

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jaxdist.errors import ConfigError

CHUNK = 1 << 18  # tokens looked at together
SAMPLED_CHUNKS = 64  # of a sequence too long to be looked at whole when it is opened
_RELEASED_BYTES = 64 << 20  # read before the pages of a mapped file are let go
_MAX_NPY_HEADER = 10_000  # bytes; numpy's own limit, which it checks once it has read them


@dataclass(frozen=True, eq=False)
class Part:
    """Tokens that lie together: `array` is 1-D, of integers, and starts at token `first` of the file at `path`."""

    array: np.ndarray
    path: str
    first: int = 0


class Tokens:
    """Parts read as one sequence of tokens.

    Every read checks what it read: a token that the vocabulary does not have is a ConfigError with its file and
    position, whether it was there at the start or not.
    """

    def __init__(self, parts: Sequence[Part], vocab_size: int):
        self.parts = tuple(part for part in parts if len(part.array))
        self.vocab_size = vocab_size
        self._ends = np.cumsum([len(part.array) for part in self.parts], dtype=np.int64)
        self._read_bytes = 0

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.parts else 0

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start .. stop-1 as int32."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start} to {stop} of {len(self)}")
        out = np.empty(stop - start, np.int32)
        done = 0
        number = int(np.searchsorted(self._ends, start, side="right"))
        while done < len(out):
            part = self.parts[number]
            within = start + done - (int(self._ends[number]) - len(part.array))
            piece = part.array[within : within + len(out) - done]
            check_vocabulary(piece, part, within, self.vocab_size)
            out[done : done + len(piece)] = piece
            self._let_go(part.array, piece.nbytes)
            done += len(piece)
            number += 1
        return out

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Rows [n, length] of tokens from each of `starts` on, as int32."""
        out = np.empty((len(starts), length), np.int32)
        for row, start in enumerate(starts.tolist()):
            out[row] = self.read(start, start + length)
        return out

    def cut(self, at: int) -> tuple["Tokens", "Tokens"]:
        """The first `at` tokens, and the rest."""
        before, after = [], []
        for part, end in zip(self.parts, self._ends.tolist(), strict=True):
            inside = min(max(at - (end - len(part.array)), 0), len(part.array))
            before.append(Part(part.array[:inside], part.path, part.first))
            after.append(Part(part.array[inside:], part.path, part.first + inside))
        return Tokens(before, self.vocab_size), Tokens(after, self.vocab_size)

    def chunks(self, most: int | None = None) -> Iterator[np.ndarray]:
        """All tokens, in order, as int32 chunks; at most `most` of them, spread evenly from the first to the last."""
        for start, stop in chunk_bounds(len(self), most):
            yield self.read(start, stop)

    def check(self) -> None:
        """Look at a sample, which is everything up to SAMPLED_CHUNKS chunks. Raises: ConfigError."""
        for _ in self.chunks(SAMPLED_CHUNKS):
            pass

    def _let_go(self, array: np.ndarray, num_bytes: int) -> None:
        # Pages of a mapped file count as memory of the process for as long as they are mapped. They stay in the
        # system's cache, which gives them back when it needs the room.
        self._read_bytes += num_bytes
        if self._read_bytes >= _RELEASED_BYTES and hasattr(mmap, "MADV_DONTNEED"):
            self._read_bytes = 0
            for part in self.parts:
                base = part.array
                while isinstance(base, np.ndarray):
                    base = base.base
                if isinstance(base, mmap.mmap):
                    base.madvise(mmap.MADV_DONTNEED)


def chunk_bounds(num_tokens: int, most: int | None) -> Iterator[tuple[int, int]]:
    count = -(-num_tokens // CHUNK)
    chosen = range(count) if most is None else np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))
    for number in chosen:
        yield int(number) * CHUNK, min((int(number) + 1) * CHUNK, num_tokens)


def check_vocabulary(tokens: np.ndarray, part: Part, position: int, vocab_size: int) -> None:
    """Refuse a token without a row in the embedding.

    Args: `tokens` start at token `position` of the part. Raises: ConfigError with the token's place in its file.
    """
    if tokens.dtype.kind == "u" and np.iinfo(tokens.dtype).max < vocab_size:
        return
    if len(tokens) == 0 or (tokens.min() >= 0 and tokens.max() < vocab_size):
        return
    bad = int(np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0])
    token = int(tokens[bad])
    largest = max(int(part.array[start:stop].max()) for start, stop in chunk_bounds(len(part.array), SAMPLED_CHUNKS))
    enough = 256 if tokens.dtype == np.uint8 else 1 + max(largest, token)
    raise ConfigError(
        asked(part.path),
        f"token {token} at position {part.first + position + bad} is outside the vocabulary of {vocab_size}: a token "
        "is a row of the embedding, 0 <= token < --vocab-size",
        "Negative tokens have no row: tokenize it again." if token < 0 else f"Use --vocab-size {enough} or more.",
    )


def unigram_entropy(sources: Sequence[tuple[Tokens, float]]) -> float:
    """Entropy of the token frequencies, in nats per token: the loss of the best model that ignores context.

    Args: `sources` are (tokens, share). Of a source longer than SAMPLED_CHUNKS chunks, an even sample is counted.
    """
    mixed = np.zeros(0)
    for tokens, share in sources:
        counts = np.zeros(0, np.int64)
        for chunk in tokens.chunks(SAMPLED_CHUNKS):
            counts = _add(counts, np.bincount(chunk))
        mixed = _add(mixed, counts / max(counts.sum(), 1) * share)
    p = mixed[mixed > 0]
    return float(np.sum(p * np.log(1 / p)))


def _add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = (a, b) if len(a) >= len(b) else (b, a)
    total = a.copy()
    total[: len(b)] += b
    return total


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------


def map_npy(path: Path) -> np.ndarray:
    """The 1-D integer array of a .npy, mapped. Raises: ConfigError for anything else, and for a damaged one."""
    try:
        with path.open("rb") as file:
            _check_header(file)
        # Not np.load, which goes by the first bytes: this reads nothing but a plain array, and never unpickles.
        tokens = np.lib.format.open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception as error:  # a damaged header ends in ValueError, tokenize.TokenError and others
        raise ConfigError(
            asked(path),
            f"it is not a whole .npy array of numbers ({error})",
            "Save it again with np.save(path, tokens), tokens being a 1-D integer array.",
        ) from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ConfigError(
            asked(path),
            f"tokens must be a 1-D integer array, and this one is {tokens.dtype}{list(tokens.shape)}",
            "Save it again with np.save(path, tokens.reshape(-1).astype(np.uint16)), or a wider integer dtype.",
        )
    return tokens


def _check_header(file: BinaryIO) -> None:
    """Refuse a header that says it is long before numpy allocates what it says."""
    version = np.lib.format.read_magic(file)
    size = int.from_bytes(file.read(2 if version == (1, 0) else 4), "little")
    if size > _MAX_NPY_HEADER:
        raise ValueError(f"its header says it has {size:,} bytes, and one of an array of numbers has about 100")


def map_bin(path: Path) -> np.ndarray:
    """The tokens of a raw little-endian uint16 file, mapped."""
    size = path.stat().st_size
    if size % 2:
        raise ConfigError(
            asked(path),
            f"a .bin is raw little-endian uint16 tokens, two bytes each, and this one has {size} bytes",
            "Write it again with tokens.astype('<u2').tofile(path), or save another dtype as a .npy.",
        )
    return np.memmap(path, "<u2", mode="r") if size else np.zeros(0, "<u2")  # an empty file cannot be mapped


def read_text(path: Path) -> bytes:
    """The bytes of a UTF-8 file."""
    text = path.read_bytes()
    decode_text(path, text)
    return text


def decode_text(path: Path, text: bytes, offset: int = 0) -> str:
    """Args: `text` starts at byte `offset` of the file. Raises: ConfigError naming the first byte that is not UTF-8."""
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            asked(path),
            f"text must be UTF-8, and the byte {text[error.start]:#04x} at offset {offset + error.start} is not",
            "Convert it to UTF-8, leave it out, or pass token ids as a .npy or .bin file.",
        ) from error


def find_files(root: Path, skipped: frozenset[str] = frozenset()) -> list[str]:
    """Relative POSIX paths of the regular files under `root`, hidden ones and `skipped` folders left out, sorted."""

    def fail(error: OSError):
        raise error  # os.walk would pass over a folder it cannot list

    names = []
    for folder, subfolders, files in os.walk(root, onerror=fail):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in skipped]
        paths = [Path(folder, name) for name in files if not name.startswith(".")]
        names += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    return sorted(names)


def asked(path: str | os.PathLike) -> str:
    return f"--data {os.fspath(path)!r}"
