"""Long sequences of tokens that stay where they are: in a file, or in the bytes of a text.

Nothing here reads a token file whole, and no token leaves without having been checked against the vocabulary.

Files are read in place (`pread`) and not mapped into memory. The pages of a mapped file count as the process's own: a
few thousand windows out of 10 GB make it 8 GB large, where it stays at 50 MB this way and is no slower. And a mapped
file that is cut while the run goes on kills the process (SIGBUS) where this is an error with the file's name.
"""

import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from jaxdist.errors import ConfigError

CHUNK = 1 << 18  # tokens looked at together
SAMPLED_CHUNKS = 64  # of a sequence too long to be looked at whole when it is opened
TokenDtype = Literal["uint16", "uint32", "int32"]  # of a .bin
LLM_C = {20240520: "<u2", 20240801: "<u4"}  # the first number of its files of tokens -> what follows the header
_LOOKED_AT = 1 << 16  # bytes


class TokenFile:
    """A 1-D array of integers in a file; `tokens[start:stop]` reads these and no others.

    Args: `dtype`, with its byte order; the array's first byte is at `offset` of the file.
    """

    def __init__(self, path: Path, dtype: np.dtype, offset: int, length: int):
        self.path, self.dtype, self._offset, self._length = path, dtype, offset, length
        self._file = path.open("rb", buffering=0)
        weakref.finalize(self, self._file.close)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, where: slice) -> np.ndarray:
        start, stop, _ = where.indices(self._length)
        size = max(stop - start, 0) * self.dtype.itemsize
        content = os.pread(self._file.fileno(), size, self._offset + start * self.dtype.itemsize)
        if len(content) != size:
            raise ConfigError(
                asked(self.path),
                f"must keep the {self._length} tokens it had when it was opened, and now ends before token {stop}",
                "Leave the file alone while a run reads it, and restore it",
            )
        return np.frombuffer(content, self.dtype)


@dataclass(frozen=True, eq=False)
class Part:
    """Tokens that lie together: `array[start:stop]`, of the file at `path`. masks: whether some may be masked."""

    array: np.ndarray | TokenFile
    path: str
    start: int
    stop: int
    masks: bool = False

    def __len__(self) -> int:
        return self.stop - self.start


def masked(tokens: np.ndarray) -> np.ndarray:
    """Tokens that are read and not predicted, a prompt's say: kept as their complements, which are negative."""
    return ~tokens.astype(np.int32)


def unmasked(tokens: np.ndarray) -> np.ndarray:
    """The tokens, masked ones too."""
    return np.where(tokens < 0, ~tokens, tokens)


def targets_of(tokens: np.ndarray) -> np.ndarray:
    """Tokens to predict: -1 for masked ones."""
    return np.maximum(tokens, -1)


class Tokens:
    """Parts read as one sequence of tokens; masked ones are negative (`masked`).

    Every read checks what it read: a token that the vocabulary does not have is a ConfigError with its file and
    position, whether it was there at the start or not.
    """

    def __init__(self, parts: Sequence[Part], vocab_size: int):
        self.parts = tuple(part for part in parts if len(part))
        self.vocab_size = vocab_size
        self._ends = np.cumsum([len(part) for part in self.parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.parts else 0

    @property
    def masks(self) -> bool:
        """Whether some may be masked."""
        return any(part.masks for part in self.parts)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start .. stop-1 as int32."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start} to {stop} of {len(self)}")
        out = np.empty(stop - start, np.int32)
        done = 0
        while done < len(out):
            number = int(np.searchsorted(self._ends, start + done, side="right"))
            part = self.parts[number]
            first = part.stop - (int(self._ends[number]) - start - done)
            piece = part.array[first : min(first + len(out) - done, first + CHUNK, part.stop)]
            check_vocabulary(unmasked(piece) if part.masks else piece, part, first, self.vocab_size)
            out[done : done + len(piece)] = piece
            done += len(piece)
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
            middle = min(max(part.stop - (end - at), part.start), part.stop)
            before.append(replace(part, stop=middle))
            after.append(replace(part, start=middle))
        return Tokens(before, self.vocab_size), Tokens(after, self.vocab_size)

    def chunks(self, most: int | None = None) -> Iterator[np.ndarray]:
        """All tokens, in order, as int32 chunks; at most `most` of them, spread evenly from the first to the last."""
        for start, stop in chunk_bounds(len(self), most):
            yield self.read(start, stop)

    def check(self) -> None:
        """Look at a sample, which is everything up to SAMPLED_CHUNKS chunks. Raises: ConfigError."""
        for _ in self.chunks(SAMPLED_CHUNKS):
            pass


def tokens_in(array: np.ndarray | TokenFile, path: Path, vocab_size: int) -> Tokens:
    """A whole file as one part, looked at (see `Tokens.check`)."""
    tokens = Tokens([Part(array, str(path), 0, len(array))], vocab_size)
    tokens.check()
    return tokens


def chunk_bounds(num_tokens: int, most: int | None) -> Iterator[tuple[int, int]]:
    count = -(-num_tokens // CHUNK)
    chosen = range(count) if most is None else np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))
    for number in chosen:
        yield int(number) * CHUNK, min((int(number) + 1) * CHUNK, num_tokens)


def check_vocabulary(tokens: np.ndarray, part: Part, position: int, vocab_size: int) -> None:
    """Refuse a token without a row in the embedding.

    Args: `tokens` start at token `position` of the file. Raises: ConfigError with the token's place in it.
    """
    unsigned = tokens.dtype.kind == "u"
    if len(tokens) == 0 or (unsigned and 1 << 8 * tokens.dtype.itemsize <= vocab_size):
        return
    if tokens.max() < vocab_size and (unsigned or tokens.min() >= 0):
        return
    bad = int(np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0])
    token = int(tokens[bad])
    largest = max(int(part.array[start:stop].max()) for start, stop in chunk_bounds(len(part.array), SAMPLED_CHUNKS))
    enough = 256 if tokens.dtype == np.uint8 else 1 + max(largest, token)
    raise ConfigError(
        asked(part.path),
        f"token {token} at position {position + bad} must be a row of the embedding, 0 <= token < {vocab_size}",
        "Negative tokens have no row: tokenize it again." if token < 0 else f"Use vocab_size={enough} or more.",
    )


def unigram_entropy(sources: Sequence[tuple[Tokens, float]]) -> float:
    """Entropy of the frequencies of tokens that are predicted, in nats per token: the loss of the best model that
    ignores context.

    Args: `sources` are (tokens, share). Of a source longer than SAMPLED_CHUNKS chunks, an even sample is counted.
    """
    mixed = np.zeros(0)
    for tokens, share in sources:
        counts = np.zeros(0, np.int64)
        for chunk in tokens.chunks(SAMPLED_CHUNKS):
            counts = _add(counts, np.bincount(chunk[chunk >= 0]))
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


def open_npy(path: Path) -> TokenFile:
    """The 1-D integer array of a .npy. Raises: ConfigError for anything else, and for a damaged one."""
    try:
        found = np.lib.format.open_memmap(path, mode="r")  # np.load goes by the first bytes, and may unpickle
    except OSError:
        raise
    except Exception as error:  # a damaged header ends in ValueError, tokenize.TokenError and others
        raise ConfigError(
            asked(path),
            f"must be a whole .npy array of numbers ({error})",
            "Save it again with np.save(path, tokens), tokens being a 1-D integer array.",
        ) from error
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ConfigError(
            asked(path),
            f"tokens must be a 1-D integer array, and this one is {found.dtype}{list(found.shape)}",
            "Save it again with np.save(path, tokens.reshape(-1).astype(np.uint16)), or a wider integer dtype.",
        )
    return TokenFile(path, found.dtype, found.offset, len(found))


def open_bin(path: Path, vocab_size: int, dtype: TokenDtype | None = None) -> TokenFile:
    """The tokens of a raw little-endian file.

    dtype: None takes uint16, unless that cannot be: the vocabulary is larger, or what is there looks like wider tokens
    or another program's format. Raises: ConfigError.
    """
    kind = np.dtype(dtype or "uint16").newbyteorder("<")
    size = path.stat().st_size
    if size % kind.itemsize:
        raise ConfigError(
            asked(path),
            f"a .bin must be raw little-endian tokens, of {kind.itemsize} bytes here, and this one has {size} bytes",
            "Say what they are with token_dtype, or save them as a .npy",
        )
    if dtype is None:
        _require_uint16(path, vocab_size)
    return TokenFile(path, kind, 0, size // kind.itemsize)


def _require_uint16(path: Path, vocab_size: int) -> None:
    with path.open("rb") as file:
        start = file.read(_LOOKED_AT)
    number = int.from_bytes(start[:4], "little")
    if number in LLM_C:
        raise ConfigError(
            asked(path),
            f"a .bin must be tokens alone, and this one has the header of llm.c ({number})",
            f"Cut it off: np.fromfile(path, '{LLM_C[number]}', offset=1024), saved with np.save",
        )
    if (beside := path.with_suffix(".idx")).exists():
        raise ConfigError(
            asked(path),
            f"a .bin must be tokens alone, and {beside.name} beside it says how those of this one are kept",
            "Say their dtype with token_dtype, or save them as a .npy",
        )
    halves = np.frombuffer(start[: len(start) // 4 * 4], "<u2").reshape(-1, 2)
    looks_wide = (
        len(halves) >= 64 and not (halves[:, 1] > (vocab_size - 1) >> 16).any() and len(np.unique(halves[:, 0])) > 1
    )
    if vocab_size > 1 << 16 or looks_wide:
        why = "every second one is 0, as in tokens of 32 bits" if looks_wide else f"the vocabulary has {vocab_size:,}"
        raise ConfigError(
            asked(path),
            f"a .bin must say what it holds where it is not plainly uint16: {why}",
            "Use token_dtype='uint32' (or 'uint16', 'int32')",
        )


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

    names, seen = [], set()
    for folder, subfolders, files in os.walk(root, onerror=fail, followlinks=True):
        here = os.stat(folder)
        if (here.st_dev, here.st_ino) in seen:  # a link to a folder above it
            subfolders.clear()
            continue
        seen.add((here.st_dev, here.st_ino))
        subfolders[:] = sorted(name for name in subfolders if not name.startswith(".") and name not in skipped)
        paths = [Path(folder, name) for name in files if not name.startswith(".")]
        names += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    return sorted(names)


def asked(path: str | os.PathLike) -> str:
    return f"data={os.fspath(path)!r}"
