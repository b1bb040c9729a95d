"""What a run trains on, and the order in which it is visited.

A corpus is one or several weighted sources, each with training and held-out tokens, read where they are when they are
asked for. A global batch is a pure function of (seed, step): a run resumes at any step, on any mesh and with any number
of processes, by asking for that step again, and a process asks for its own rows alone.
"""

import hashlib
import math
import os
import platform
import re
import stat
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from jaxdist.commands import command_text
from jaxdist.config import RunConfig
from jaxdist.data.order import Mixture, epoch_keys, make_mixture, shuffled
from jaxdist.data.prepared import is_prepared, open_prepared
from jaxdist.data.tokenizer import ByteTokenizer
from jaxdist.data.tokens import (
    SAMPLED_CHUNKS,
    TokenDtype,
    Tokens,
    asked,
    find_files,
    open_bin,
    open_npy,
    read_text,
    targets_of,
    tokens_in,
    unigram_entropy,
    unmasked,
)
from jaxdist.errors import ConfigError

# Installed packages and caches differ from machine to machine; tests hold broken source on purpose.
_NOT_CORPUS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "turtledemo"}
)
_BYTES = {"tokenizer": "bytes", "end_of_document": ByteTokenizer.end_of_document, "begin_of_text": ()}
# Short: a number like 1e99999999 would be written out in full.
_WEIGHT = re.compile(r"(\d{1,20}(\.\d{0,20})?|\.\d{1,20})([eE][+-]?\d{1,2})?|\d{1,20}/[1-9]\d{0,19}", re.ASCII)


@dataclass(frozen=True, eq=False)
class Source:
    """Training and held-out tokens, and the share of the samples that they give."""

    train: Tokens
    held_out: Tokens
    about: str  # for people: what was read
    weight: Fraction = Fraction(1)
    tokenizer: str | None = None  # what the tokens mean: "bytes", the hash of a tokenizer.json, or unknown
    end_of_document: int | None = None  # the token after each document, where it is known
    tokenizer_file: Path | None = None
    begin_of_text: tuple[int, ...] | None = None  # the tokens before each document, where they are known


@dataclass(frozen=True, eq=False)
class Corpus:
    """One source, or several that are mixed by their weights."""

    sources: tuple[Source, ...]

    def __post_init__(self):
        known = {source.tokenizer: source for source in self.sources if source.tokenizer is not None}
        if len(known) > 1:
            first, second, *_ = known.values()
            raise ConfigError(
                f"data that mixes {first.about} and {second.about}",
                "their tokens must all come from one tokenizer, or one number would mean two things",
                f"Prepare them with one tokenizer: `{command_text('prepare')} --tokenizer FILE`",
            )
        begins = {source.begin_of_text: source.about for source in self.sources if source.begin_of_text is not None}
        if len(begins) > 1:
            raise ConfigError(
                f"data that mixes {' and '.join(begins.values())}",
                f"their documents must begin with the same tokens, and do with {' and '.join(map(str, begins))}",
                f"Prepare them again with this version of `{command_text('prepare')}`",
            )

    @property
    def tokens_of(self) -> Source:
        """A source that says what its tokens mean, if one does; all that do say the same."""
        return next((source for source in self.sources if source.tokenizer is not None), self.sources[0])

    @property
    def end_of_document(self) -> int | None:
        """The token after each document. Raises: ConfigError where a source does not say, or two say another."""
        for source in self.sources:
            if source.end_of_document is None:
                raise ConfigError(
                    f"mask_documents=True with {source.about}",
                    "its tokens must say where a document ends, and bare tokens do not",
                    f"Prepare the text with `{command_text('prepare')}`, or leave mask_documents out",
                )
        ends = {source.end_of_document: source.about for source in self.sources}
        if len(ends) > 1:
            raise ConfigError(
                f"mask_documents=True with {' and '.join(ends.values())}",
                f"their documents must end with the same token, and end with {' and '.join(map(str, ends))}",
                f"Prepare them with one --end-of-document of `{command_text('prepare')}`",
            )
        end = self.sources[0].end_of_document
        if any(end in (source.begin_of_text or ()) for source in self.sources):
            raise ConfigError(
                f"mask_documents=True with {self.about}",
                f"the token {end} that ends documents must not stand before them too, or it would be a document",
                f"Prepare them with another --end-of-document of `{command_text('prepare')}`",
            )
        return end

    @cached_property
    def mixture(self) -> Mixture:
        return make_mixture([source.weight for source in self.sources])

    @property
    def shares(self) -> list[float]:
        """Share of the samples, for each source; they sum to 1."""
        return [share / self.mixture.period for share in self.mixture.shares]

    @property
    def about(self) -> str:
        """For people: what was read, each source with its share."""
        if len(self.sources) == 1:
            return self.sources[0].about
        return "; ".join(f"{share:.4g} of {s.about}" for share, s in zip(self.shares, self.sources, strict=True))

    @property
    def num_train(self) -> int:
        return sum(len(source.train) for source in self.sources)

    @property
    def num_held_out(self) -> int:
        return sum(len(source.held_out) for source in self.sources)

    def unigram_entropy(self) -> float:
        """Unigram entropy of the training mixture, in nats per token; of a long source, from an even sample."""
        return unigram_entropy([(s.train, share) for s, share in zip(self.sources, self.shares, strict=True)])

    def fingerprint(self) -> str:
        """SHA-256 of the weights, the lengths and the tokens, of a long source an even sample, to know data again."""
        digest = hashlib.sha256()
        for source in self.sources:
            for tokens in (source.train, source.held_out):
                digest.update(f"{source.weight} {len(tokens)}\n".encode())
                for chunk in tokens.chunks(SAMPLED_CHUNKS):
                    digest.update(chunk.astype("<i4").tobytes())
        return digest.hexdigest()


class GlobalBatch(Mapping):
    """One global batch, read when it is asked for: some rows by `read`, an array of all of them by its name.

    `inputs` and `targets` int32 [B, T], targets one token ahead (-1: no target, which no loss counts); `rows` int32
    [B], the row's index in the global batch, which stays with the row however a mesh shards it (dropout masks are
    keyed on it). Where documents are told apart, also `starts` int32 [B, T]: where in its row the document of each
    input begins; and no first token of a document is a target.

    Args: `read_windows` takes row numbers [n] and returns inputs and targets [n, T]. `end_of_document` is the token
    after each document, None where they are not told apart.
    """

    def __init__(
        self,
        num_rows: int,
        read_windows: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
        end_of_document: int | None = None,
    ):
        self.num_rows = num_rows
        self._read_windows = read_windows
        self._end_of_document = end_of_document
        self._seen: dict[tuple[int, int, int], dict[str, np.ndarray]] = {}

    def read(self, rows: slice = slice(None)) -> dict[str, np.ndarray]:
        """These rows of every array; nothing else is read from disk, and that once for all ranks that hold them."""
        key = rows.indices(self.num_rows)
        if key not in self._seen:
            numbers = np.arange(*key)
            inputs, targets = self._read_windows(numbers)
            found = {"inputs": inputs, "targets": targets, "rows": numbers.astype(np.int32)}
            if self._end_of_document is not None:
                ends = inputs == self._end_of_document
                found["targets"] = np.where(ends, -1, targets)
                found["starts"] = document_starts(ends)
            self._seen[key] = found
        return self._seen[key]

    def __getitem__(self, name: str) -> np.ndarray:
        return self.read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(("inputs", "targets", "rows") + (("starts",) if self._end_of_document is not None else ()))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def digest(self) -> str:
        """SHA-256 of every token of the batch, to prove that two runs saw the same."""
        whole = self.read()
        return hashlib.sha256(b"".join(whole[name].astype("<i4").tobytes() for name in self)).hexdigest()


def document_starts(ends: np.ndarray) -> np.ndarray:
    """Where each token ends its document [n, T] -> where the document of each begins: int32 [n, T], 0 at a row's."""
    begins = np.zeros(ends.shape, np.int32)
    begins[:, 1:] = np.where(ends[:, :-1], np.arange(1, ends.shape[1], dtype=np.int32), 0)
    return np.maximum.accumulate(begins, axis=1)


@dataclass(frozen=True, eq=False)
class Batches:
    """Global batches of next-token windows: `batches[step]`, for every step >= 0, is a pure function of seed and step.

    Window w of a source covers tokens[w*seq_len : w*seq_len + seq_len + 1]; neighbours share one token, the last target
    of one being the first input of the next. Sample i is row i % batch_size of batch i // batch_size. The mixture says
    which source it comes from; each epoch of a source visits each of its windows once, in an order of its own. A batch
    may straddle two epochs.

    Args: `batch_size` counts rows of the global batch, summed over every mesh axis and micro-batch. `documents` tells
    them apart.

    Raises: ConfigError where a source does not fill one batch, naming the batch size and sequence length that would.
    """

    corpus: Corpus
    batch_size: int
    seq_len: int
    seed: int
    documents: bool = False

    def __post_init__(self):
        for name, value, least in (
            ("batch_size", self.batch_size, 1),
            ("seq_len", self.seq_len, 1),
            ("seed", self.seed, 0),
        ):
            if value < least:
                raise ConfigError(f"{name}={value}", f"must be at least {least}", f"Use {name}={least} or more.")
        _ = self.end_of_document  # refuses data that does not say
        mixture = self.corpus.mixture
        for source, each, num_windows in zip(self.corpus.sources, mixture.shares, self.num_windows, strict=True):
            share = Fraction(each, mixture.period)
            rows = math.ceil(self.batch_size * share)  # of the first batch, at most
            if num_windows < rows:
                self._refuse_short(source, share, rows, num_windows)
            if source.train.masks and not any((chunk >= 0).any() for chunk in source.train.chunks(SAMPLED_CHUNKS)):
                _refuse_masked("training", source)

    def _refuse_short(self, source: Source, share: Fraction, rows: int, num_windows: int):
        usable = max(len(source.train) - 1, 0)
        smaller = [
            f"{name}={most} or less"
            for name, most in (("batch_size", int(num_windows / share)), ("seq_len", usable // rows))
            if most >= 1
        ]
        where, size = "", "batch size"
        if len(self.corpus.sources) > 1:
            where, size = f" in {source.about}", f"its {rows} rows of a batch"
        raise ConfigError(
            f"batch_size={self.batch_size} with seq_len={self.seq_len}",
            f"one batch must have {rows * self.seq_len + 1} tokens ({size} * sequence length + 1), and there are "
            f"{len(source.train)}{where}",
            f"Use {' or '.join([*smaller, 'more data'])}.",
        )

    @property
    def num_windows(self) -> list[int]:
        """Windows of each source, in one epoch. The last target needs a token after the last input."""
        return [max(len(source.train) - 1, 0) // self.seq_len for source in self.corpus.sources]

    def __getitem__(self, step: int) -> GlobalBatch:
        """The global batch of one step; no token is read before the batch is asked for it."""
        if step < 0:
            raise IndexError(f"step {step}: the first batch is step 0")
        return GlobalBatch(
            self.batch_size, lambda rows: self._read(step * self.batch_size + rows), self.end_of_document
        )

    @property
    def end_of_document(self) -> int | None:
        return self.corpus.end_of_document if self.documents else None

    def epochs(self, step: int) -> list[float]:
        """Epochs of each source that are done before `step`."""
        counts = self.corpus.mixture.counts(step * self.batch_size)
        return [count / windows for count, windows in zip(counts, self.num_windows, strict=True)]

    def _read(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        text = self._windows(samples)
        return unmasked(text[:, :-1]), targets_of(text[:, 1:])

    def window(self, sample: int) -> np.ndarray:
        """The tokens of one sample [T + 1], masked ones negative."""
        return self._windows(np.array([sample]))[0]

    def _windows(self, samples: np.ndarray) -> np.ndarray:
        text = np.empty((len(samples), self.seq_len + 1), np.int32)
        sources, numbers = self.corpus.mixture.locate(samples)
        for index, (source, num_windows) in enumerate(zip(self.corpus.sources, self.num_windows, strict=True)):
            here = np.flatnonzero(sources == index)
            epochs, places = np.divmod(numbers[here], num_windows)
            for epoch in np.unique(epochs):
                rows = here[epochs == epoch]
                keys = epoch_keys(self.seed, index, int(epoch))
                windows = shuffled(places[epochs == epoch], num_windows, keys)
                text[rows] = source.train.windows(windows * self.seq_len, self.seq_len + 1)
        return text


EVAL_WINDOWS = 64  # that an evaluation looks at where nobody has said how many


def held_out_batches(
    corpus: Corpus, batch_size: int, seq_len: int, most: int = EVAL_WINDOWS, documents: bool = False
) -> list[GlobalBatch]:
    """At most `most` held-out windows in batches: the same windows at every call, whatever the batch size.

    Each source gives windows by its share, spread evenly over its held-out tokens, or all it has. Every window that is
    there counts, and once: rows and positions without a token have target -1, which no loss counts.

    Raises: ConfigError when there are fewer than two tokens, since a target needs the token before it.
    """

    def text_at(place: tuple[Tokens, int]) -> np.ndarray:
        tokens, start = place
        return tokens.read(start, min(start + seq_len + 1, len(tokens)))

    chosen: list[tuple[Tokens, int]] = []
    end_of_document = corpus.end_of_document if documents else None
    for source, count in zip(corpus.sources, corpus.mixture.counts(most), strict=True):
        tokens = source.held_out
        if len(tokens) < 2:
            raise ConfigError(
                f"held-out data of {len(tokens)} tokens in {source.about}",
                "there must be one target and the token before it",
                "Use more data.",
            )
        num_windows = -(-(len(tokens) - 1) // seq_len)
        windows = np.unique(np.linspace(0, num_windows - 1, min(num_windows, count)).astype(int))
        found = [(tokens, int(window) * seq_len) for window in windows]
        if found and tokens.masks and not any((text_at(place)[1:] >= 0).any() for place in found):
            _refuse_masked("held-out", source)
        chosen += found

    texts = [partial(text_at, place) for place in chosen]
    return _batches_of(texts, batch_size, seq_len, end_of_document)


def first_batches(batches: Batches, most: int = EVAL_WINDOWS) -> list[GlobalBatch]:
    """The first `most` windows that training looks at, in batches; no window after them counts."""
    mixture = batches.corpus.mixture
    found = zip(batches.num_windows, mixture.shares, strict=True)
    once = min(windows * mixture.period // share for windows, share in found)  # before any source begins again
    texts = [partial(batches.window, sample) for sample in range(min(most, once))]
    return _batches_of(texts, batches.batch_size, batches.seq_len, batches.end_of_document)


def _batches_of(
    texts: Sequence[Callable[[], np.ndarray]], batch_size: int, seq_len: int, end_of_document: int | None
) -> list[GlobalBatch]:
    """Windows of at most seq_len + 1 tokens, masked ones negative, in batches whose last is filled up with nothing."""

    def batch_from(first: int) -> GlobalBatch:
        def read(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            inputs = np.zeros((len(rows), seq_len), np.int32)
            targets = np.full((len(rows), seq_len), -1, np.int32)
            for place, number in enumerate(first + rows):
                if number < len(texts):
                    text = texts[number]()
                    inputs[place, : len(text) - 1] = unmasked(text[:-1])
                    targets[place, : len(text) - 1] = targets_of(text[1:])
            return inputs, targets

        return GlobalBatch(batch_size, read, end_of_document)

    return [batch_from(first) for first in range(0, len(texts), batch_size)]


def _refuse_masked(split: str, source: Source):
    raise ConfigError(
        f"{split} data of {source.about}",
        "some of its tokens must be targets, and all that were looked at are masked",
        "Shorten the prompts or use longer sequences, so that windows reach the answers",
    )


# ---------------------------------------------------------------------------------------------------------------------
# Sources
# ---------------------------------------------------------------------------------------------------------------------


def load_corpus(path: str | None, vocab_size: int, token_dtype: TokenDtype | None = None) -> Corpus:
    """Open the training and held-out tokens at `path` and check them against the vocabulary.

    Args:
        path: a `.npy` file (1-D integers) or a `.bin` file (raw and little-endian), both read in place; any other file
            is UTF-8 text whose bytes are the tokens. A folder is what `prepare` made, or else all of
            its text files, hidden ones left out, joined by NUL bytes. None is the source of the running Python's
            standard library. `a=0.7,b=0.3` mixes several.

        token_dtype: of the tokens of a `.bin`; None where they are uint16 and look like it.

    A single file holds out its last tenth. A folder is split by file: a hash of the relative path holds out about one
    in ten, or the last file where the hash leaves one side empty.

    Token files are looked at whole up to 2^24 tokens, and in an even sample beyond: opening one takes no longer for
    being large. What was not looked at is checked when it is read, before the model gets it.

    Raises: ConfigError naming the file, and the token or byte where there is one.
    """
    named = [] if path is None else parse_sources(path)
    if token_dtype is not None and not any(Path(name).suffix == ".bin" for name, _ in named):
        raise ConfigError(
            f"token_dtype={token_dtype}" + ("" if path is None else f" with {asked(path)}"),
            "must be given only with a .bin, whose numbers it is of: it would change nothing",
            "Leave it out, or give the file a name that ends in .bin",
        )
    if path is None:
        return Corpus((_load_source(None, vocab_size, token_dtype),))
    sources = []
    for name, weight in named:
        source = _load_source(name, vocab_size, token_dtype)
        sources.append(replace(source, weight=weight))
    return Corpus(tuple(sources))


def parse_sources(text: str) -> list[tuple[str, Fraction]]:
    """`a=0.7,b=0.3` -> paths with their weights; anything without "=", or that exists by this name, is one path."""
    if "=" not in text or os.path.exists(text):
        return [(text, Fraction(1))]
    sources: list[tuple[str, Fraction]] = []
    for item in text.split(","):
        path, _, number = item.rpartition("=")
        weight = Fraction(number) if path and _WEIGHT.fullmatch(number) else Fraction(0)
        if not Fraction(1, 10**12) <= weight <= 10**12:
            raise ConfigError(
                asked(text),
                "each source of a mixture must be PATH=WEIGHT, the weight a number from 1e-12 to 1e12, and "
                f"{item!r:.200} is not",
                "Write data='a.bin=0.7,b.npy=0.3' (a path with a comma or an equals sign in it cannot be mixed)",
            )
        if path in [path for path, _ in sources]:
            raise ConfigError(asked(text), f"must name {path!r} only once", "Give it the sum of both weights")
        sources.append((path, weight))
    return sources


def _load_source(path: str | None, vocab_size: int, token_dtype: TokenDtype | None) -> Source:
    root = Path(sysconfig.get_paths()["stdlib"] if path is None else path)
    try:
        if path is None:
            return _load_standard_library(root, vocab_size)
        # Not Path(path).stat(): an empty path, such as an unset shell variable, would mean the current folder.
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            return _load_folder(root, vocab_size)
        if stat.S_ISREG(mode):
            return _load_file(root, vocab_size, token_dtype)
    except OSError as error:
        raise ConfigError(
            asked(root if error.filename is None else error.filename),
            f"it cannot be read ({error.strerror})",
            "Pass an existing text file, folder, .npy or .bin that you may read.",
        ) from error
    raise ConfigError(
        asked(path),
        "must be a regular file or a folder, since the tokens are read more than once",
        "Write the data to a file first.",
    )


def _load_standard_library(root: Path, vocab_size: int) -> Source:
    names = [name for name in find_files(root, _NOT_CORPUS) if name.endswith(".py")] if root.is_dir() else []
    documents = {name: (root / name).read_bytes() for name in names}
    if not any(documents.values()):
        raise ConfigError(
            "no data given",
            f"there must be text: by default the source of Python's standard library, which is not in {root}",
            "Name a text file, a folder of text, a .npy or a .bin.",
        )
    version = ".".join(platform.python_version_tuple()[:2])
    name = f"{platform.python_implementation()} {version} standard library"
    return _split_by_file(documents, root, name, vocab_size)


def _load_folder(root: Path, vocab_size: int) -> Source:
    if is_prepared(root):
        found = open_prepared(root, vocab_size)._asdict()
        return Source(**found)
    documents = {name: read_text(root / name) for name in find_files(root)}
    if not any(documents.values()):
        raise ConfigError(
            asked(root),
            "must hold text (hidden files and folders are left out)",
            "Pass a folder with at least one UTF-8 text file in it.",
        )
    return _split_by_file(documents, root, str(root), vocab_size)


def _load_file(path: Path, vocab_size: int, token_dtype: TokenDtype | None) -> Source:
    by_suffix: dict = {".npy": open_npy, ".bin": partial(open_bin, vocab_size=vocab_size, dtype=token_dtype)}
    opened = by_suffix.get(path.suffix)
    array = opened(path) if opened else _bytes(read_text(path))
    if len(array) == 0:
        raise ConfigError(asked(path), "must not be empty", "Pass a file with tokens in it.")
    train, held_out = _split_tail(tokens_in(array, path, vocab_size))
    if opened:
        return Source(train, held_out, f"{path}, {array.dtype} tokens")
    return Source(train, held_out, f"{path}, UTF-8 bytes", **_BYTES)


def _bytes(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)


def _split_tail(tokens: Tokens) -> tuple[Tokens, Tokens]:
    return tokens.cut(len(tokens) * 9 // 10)


def _split_by_file(documents: dict[str, bytes], root: Path, title: str, vocab_size: int) -> Source:
    documents = {name: text for name, text in documents.items() if text}
    checked = {name: tokens_in(_bytes(text), root / name, vocab_size) for name, text in documents.items()}
    about = f"{title}, {len(documents)} file{'s' if len(documents) > 1 else ''}"
    if len(documents) == 1:
        return Source(*_split_tail(*checked.values()), about, **_BYTES)
    held_out = held_out_names(list(documents))

    def joined(names: list[str]) -> Tokens:
        end = bytes([ByteTokenizer.end_of_document or 0])  # a token that every vocabulary has
        return tokens_in(_bytes(end.join(documents[name] for name in names)), root, vocab_size)

    train = [name for name in documents if name not in held_out]
    return Source(joined(train), joined(sorted(held_out)), about, **_BYTES)


def held_out_names(names: list[str]) -> set[str]:
    """About one in ten, by a hash of the name; the last where that leaves one side empty."""
    held_out = {name for name in names if _is_held_out(name)}
    return held_out if len(held_out) not in (0, len(names)) else {names[-1]}


def _is_held_out(name: str) -> bool:
    # Not hash(), which differs from process to process: a held-out file must stay held out when a run resumes.
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "big") % 10 == 0


def random_batches(config: RunConfig, num_steps: int, seed: int = 1) -> list[dict[str, np.ndarray]]:
    """Random tokens; some targets are ignored, unevenly over the rows, so that a mean of means shows. Where documents
    are told apart, they begin at random."""
    rng = np.random.default_rng(seed)
    rows, length = config.batch_size, config.model.seq_len
    batches = []
    for _ in range(num_steps):
        tokens = rng.integers(0, config.model.vocab_size, (rows, length + 1)).astype(np.int32)
        targets = tokens[:, 1:].copy()
        for row in range(rows):
            targets[row, length - (row * length) // (2 * rows) :] = -1
        batch = {"inputs": tokens[:, :-1], "targets": targets, "rows": np.arange(rows, dtype=np.int32)}
        if config.mask_documents:
            begins = rng.random((rows, length)) < 0.2
            batch["starts"] = np.maximum.accumulate(np.where(begins, np.arange(length, dtype=np.int32), 0), axis=1)
        batches.append(batch)
    return batches
