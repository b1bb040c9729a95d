"""Tokens from disk, and the order in which training visits them.

A corpus is two token arrays, training and held-out, left memory-mapped where the file allows it. The order of the data
is a pure function of (seed, step), so a run resumes at any step, on any mesh, by asking for that step again.
"""

import hashlib
import os
import platform
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from jaxdist.errors import ConfigError

_CHUNK = 1 << 20  # tokens looked at together, so that a memory map is never loaded whole

# Installed packages and caches differ from machine to machine; tests hold broken source on purpose.
_NOT_CORPUS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "turtledemo"}
)


@dataclass(frozen=True, eq=False)
class Corpus:
    """Training and held-out tokens (1-D integer arrays, possibly memory maps, in their file's dtype)."""

    train: np.ndarray
    held_out: np.ndarray
    source: str  # for people: what was read


def load_corpus(path: str | None, vocab_size: int) -> Corpus:
    """Read the training and held-out tokens at `path` and check each against the vocabulary.

    Args:
        path: a `.npy` file (1-D integers) or a `.bin` file (raw little-endian uint16), both memory-mapped; any other
            file is UTF-8 text whose bytes are the tokens. A folder is all of its text files, hidden ones left out,
            joined by NUL bytes. None is the source of the running Python's standard library.

    A single file holds out its last tenth. A folder is split by file: a hash of the relative path holds out about one
    in ten, or the last file where the hash leaves one side empty.

    Raises: ConfigError naming the file, and the token or byte where there is one.
    """
    root = Path(sysconfig.get_paths()["stdlib"] if path is None else path)
    try:
        if path is None:
            return _load_standard_library(root, vocab_size)
        # Not Path(path).stat(): an empty path, such as an unset shell variable, would mean the current folder.
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            return _load_folder(root, vocab_size)
        if stat.S_ISREG(mode):
            return _load_file(root, vocab_size)
    except OSError as error:
        raise ConfigError(
            _asked(root if error.filename is None else error.filename),
            f"it cannot be read ({error.strerror})",
            "Pass an existing text file, folder, .npy or .bin that you may read.",
        ) from error
    raise ConfigError(
        _asked(path),
        "it is neither a regular file nor a folder, and the tokens are read more than once",
        "Write the data to a file first.",
    )


def unigram_entropy(tokens: np.ndarray) -> float:
    """Entropy of the token frequencies, in nats per token: the loss of the best model that ignores context."""
    counts = np.zeros(0, np.int64)
    for _, chunk in _chunks(tokens):
        # The cast is for uint64, which bincount refuses in numpy 2.0.
        longer = np.bincount(chunk.astype(np.int64), minlength=len(counts))
        longer[: len(counts)] += counts
        counts = longer
    p = counts[counts > 0] / len(tokens)
    return float(np.sum(p * np.log(1 / p)))


@dataclass(frozen=True, eq=False)
class Batches:
    """Global batches of next-token windows: `batches[step]`, for every step >= 0, is a pure function of seed and step.

    Window w covers tokens[w*seq_len : w*seq_len + seq_len + 1]; neighbours share one token, the last target of one
    being the first input of the next. Each epoch visits every window once, in an order of its own; a batch may straddle
    two epochs.

    Args:
        batch_size: rows of the global batch, summed over every mesh axis and micro-batch.
        seed: orders the windows; None visits them in order, epoch after epoch (held-out evaluation).

    Raises: ConfigError when the tokens do not fill one batch, naming the batch size and sequence length that would.
    """

    tokens: np.ndarray
    batch_size: int
    seq_len: int
    seed: int | None

    def __post_init__(self):
        for flag, value, least in (
            ("--batch-size", self.batch_size, 1),
            ("--seq-len", self.seq_len, 1),
            ("--seed", self.seed, 0),
        ):
            if value is not None and value < least:
                raise ConfigError(f"{flag} {value}", f"it must be at least {least}", f"Use {flag} {least} or more.")
        if self.num_windows < self.batch_size:
            usable = max(len(self.tokens) - 1, 0)
            smaller = [
                f"{flag} {most} or less"
                for flag, most in (("--batch-size", self.num_windows), ("--seq-len", usable // self.batch_size))
                if most >= 1
            ]
            raise ConfigError(
                f"--batch-size {self.batch_size} --seq-len {self.seq_len}",
                f"one batch needs {self.batch_size * self.seq_len + 1} tokens (batch size * sequence length + 1) and "
                f"there are {len(self.tokens)}",
                f"Use {' or '.join([*smaller, 'more data'])}.",
            )

    @property
    def num_windows(self) -> int:
        # The last target needs a token after the last input.
        return max(len(self.tokens) - 1, 0) // self.seq_len

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        """The global batch of one step.

        Returns: `inputs` and `targets` int32 [B, T], targets one token ahead; `rows` int32 [B], the row's index in the
        global batch, which stays with the row however a mesh shards it (dropout masks are keyed on it).
        """
        if step < 0:
            raise IndexError(f"step {step}: the first batch is step 0")
        samples = step * self.batch_size + np.arange(self.batch_size)
        epochs, places = np.divmod(samples, self.num_windows)
        windows = np.array([self._window(int(epoch), place) for epoch, place in zip(epochs, places, strict=True)])
        # Gathered before the cast: only this batch's tokens are read from a memory map.
        batch = self.tokens[windows[:, None] * self.seq_len + np.arange(self.seq_len + 1)]
        return {
            "inputs": batch[:, :-1].astype(np.int32),
            "targets": batch[:, 1:].astype(np.int32),
            "rows": np.arange(self.batch_size, dtype=np.int32),
        }

    def _window(self, epoch: int, place: int) -> int:
        return place if self.seed is None else _permutation(self.seed, epoch, self.num_windows)[place]


def held_out_batches(tokens: np.ndarray, batch_size: int, seq_len: int, limit: int) -> list[dict[str, np.ndarray]]:
    """At most `limit` batches of windows spread evenly over the held-out tokens, the same ones at every call.

    Every window that is there counts, and once: rows and positions without a token have target -1, which no loss
    counts.

    Raises: ConfigError when there are fewer than two tokens, since a target needs the token before it.
    """
    if len(tokens) < 2:
        raise ConfigError(
            f"held-out data of {len(tokens)} tokens", "one target and the token before it are needed", "Use more data."
        )
    num_windows = -(-(len(tokens) - 1) // seq_len)
    chosen = np.unique(np.linspace(0, num_windows - 1, min(num_windows, limit * batch_size)).astype(int))
    batches = []
    for first in range(0, len(chosen), batch_size):
        inputs = np.zeros((batch_size, seq_len), np.int32)
        targets = np.full((batch_size, seq_len), -1, np.int32)
        for row, window in enumerate(chosen[first : first + batch_size]):
            text = tokens[window * seq_len : (window + 1) * seq_len + 1]
            inputs[row, : len(text) - 1], targets[row, : len(text) - 1] = text[:-1], text[1:]
        batches.append({"inputs": inputs, "targets": targets, "rows": np.arange(batch_size, dtype=np.int32)})
    return batches


@lru_cache(maxsize=2)  # a batch straddles at most two epochs
def _permutation(seed: int, epoch: int, num_windows: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch]))).permutation(num_windows)


# ---------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------


def _load_standard_library(root: Path, vocab_size: int) -> Corpus:
    names = [name for name in _find_files(root, _NOT_CORPUS) if name.endswith(".py")] if root.is_dir() else []
    documents = {name: np.frombuffer((root / name).read_bytes(), np.uint8) for name in names}
    if not any(map(len, documents.values())):
        raise ConfigError(
            "no --data given",
            f"the default corpus is the source of Python's standard library, and there is none in {root}",
            "Pass --data with a text file, a folder of text, a .npy or a .bin.",
        )
    version = ".".join(platform.python_version_tuple()[:2])
    name = f"{platform.python_implementation()} {version} standard library"
    return _split_by_file(documents, root, name, vocab_size)


def _load_folder(root: Path, vocab_size: int) -> Corpus:
    documents = {name: _read_text(root / name) for name in _find_files(root)}
    if not any(map(len, documents.values())):
        raise ConfigError(
            _asked(root),
            "the folder holds no text (hidden files and folders are left out)",
            "Pass a folder with at least one UTF-8 text file in it.",
        )
    return _split_by_file(documents, root, str(root), vocab_size)


def _load_file(path: Path, vocab_size: int) -> Corpus:
    read = {".npy": _map_npy, ".bin": _map_bin}.get(path.suffix, _read_text)
    tokens = read(path)
    if len(tokens) == 0:
        raise ConfigError(_asked(path), "the file is empty", "Pass a file with tokens in it.")
    _check_tokens(path, tokens, vocab_size)
    kind = "UTF-8 bytes" if read is _read_text else f"{tokens.dtype} tokens"
    return _split_tail(tokens, f"{path}, {kind}")


def _find_files(root: Path, skipped: frozenset[str] = frozenset()) -> list[str]:
    """Relative POSIX paths of the regular files under `root`, hidden ones and `skipped` folders left out, sorted."""

    def fail(error: OSError):
        raise error  # os.walk would pass over a folder it cannot list

    names = []
    for folder, subfolders, files in os.walk(root, onerror=fail):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in skipped]
        paths = [Path(folder, name) for name in files if not name.startswith(".")]
        names += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    return sorted(names)


def _read_text(path: Path) -> np.ndarray:
    text = path.read_bytes()
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            _asked(path),
            f"text must be UTF-8, and the byte {text[error.start]:#04x} at offset {error.start} is not",
            "Convert it to UTF-8, leave it out, or pass token ids as a .npy or .bin file.",
        ) from error
    return np.frombuffer(text, np.uint8)


def _map_npy(path: Path) -> np.ndarray:
    try:
        # Not np.load, which goes by the first bytes: this reads nothing but a plain array, and never unpickles.
        tokens = np.lib.format.open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception as error:  # a damaged header ends in ValueError, tokenize.TokenError and others
        raise ConfigError(
            _asked(path),
            f"it is not a whole .npy array of numbers ({error})",
            "Save it again with np.save(path, tokens), tokens being a 1-D integer array.",
        ) from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ConfigError(
            _asked(path),
            f"tokens must be a 1-D integer array, and this one is {tokens.dtype}{list(tokens.shape)}",
            "Save it again with np.save(path, tokens.reshape(-1).astype(np.uint16)), or a wider integer dtype.",
        )
    return tokens


def _map_bin(path: Path) -> np.ndarray:
    size = path.stat().st_size
    if size % 2:
        raise ConfigError(
            _asked(path),
            f"a .bin is raw little-endian uint16 tokens, two bytes each, and this one has {size} bytes",
            "Write it again with tokens.astype('<u2').tofile(path), or save another dtype as a .npy.",
        )
    return np.memmap(path, "<u2", mode="r") if size else np.zeros(0, "<u2")  # an empty file cannot be mapped


def _check_tokens(path: Path, tokens: np.ndarray, vocab_size: int) -> None:
    for start, chunk in _chunks(tokens):
        bad = np.flatnonzero((chunk < 0) | (chunk >= vocab_size))
        if len(bad):
            token = int(chunk[bad[0]])
            enough = 256 if tokens.dtype == np.uint8 else 1 + max(int(chunk.max()) for _, chunk in _chunks(tokens))
            raise ConfigError(
                _asked(path),
                f"token {token} at position {start + int(bad[0])} is outside the vocabulary of {vocab_size}: a token "
                "is a row of the embedding, 0 <= token < --vocab-size",
                "Negative tokens have no row: tokenize it again."
                if token < 0
                else f"Use --vocab-size {enough} or more.",
            )


# ---------------------------------------------------------------------------------------------------------------------
# Splitting
# ---------------------------------------------------------------------------------------------------------------------


def _split_tail(tokens: np.ndarray, source: str) -> Corpus:
    cut = len(tokens) * 9 // 10
    return Corpus(tokens[:cut], tokens[cut:], source)


def _split_by_file(documents: dict[str, np.ndarray], root: Path, title: str, vocab_size: int) -> Corpus:
    documents = {name: tokens for name, tokens in documents.items() if len(tokens)}
    for name, tokens in documents.items():
        _check_tokens(root / name, tokens, vocab_size)
    names = list(documents)
    source = f"{title}, {len(names)} file{'s' if len(names) > 1 else ''}"
    if len(names) == 1:
        return _split_tail(documents[names[0]], source)
    held_out = {name for name in names if _is_held_out(name)}
    if len(held_out) in (0, len(names)):
        held_out = {names[-1]}
    # The NUL byte between documents is token 0, which every vocabulary has.
    train_bytes = b"\0".join(tokens for name, tokens in documents.items() if name not in held_out)
    held_out_bytes = b"\0".join(tokens for name, tokens in documents.items() if name in held_out)
    return Corpus(np.frombuffer(train_bytes, np.uint8), np.frombuffer(held_out_bytes, np.uint8), source)


def _is_held_out(name: str) -> bool:
    # Not hash(), which differs from process to process: a held-out file must stay held out when a run resumes.
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "big") % 10 == 0


# ---------------------------------------------------------------------------------------------------------------------


def _chunks(tokens: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    for start in range(0, len(tokens), _CHUNK):
        yield start, tokens[start : start + _CHUNK]


def _asked(path: str | os.PathLike) -> str:
    return f"--data {os.fspath(path)!r}"
