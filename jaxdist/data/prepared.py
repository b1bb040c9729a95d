"""A prepared corpus: a folder of token shards, their tokenizer, and a manifest that says what belongs to it.

    manifest.json        written last: a folder without it is not whole
    tokenizer.json       as Hugging Face `tokenizers` saves it; none where the tokens are bytes
    train-00000.npy ...  1-D tokens, each document followed by the end-of-document token
    held_out-00000.npy ...

Opening compares sizes and headers, which takes no longer for a larger corpus; `check` reads everything.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxdist.commands import command_text
from jaxdist.data.tokens import Part, Tokens, asked, open_npy
from jaxdist.errors import ConfigError
from jaxdist.files import read_object
from jaxdist.values import fields_of

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
JOURNAL = "unfinished.json"  # there while a preparation has not come to its end
FORMAT = "jaxdist tokens 1"
SPLITS = ("train", "held_out")
MASKABLE = "int32"  # of shards in which tokens may be masked (`jaxdist.data.tokens.masked`)
DTYPES = ("uint8", "uint16", "uint32", MASKABLE)
_MAX_MANIFEST_BYTES = 64 << 20


def _remedy() -> str:
    return f"Prepare the corpus again with `{command_text('prepare')}`, or copy the folder again from where it is whole"


@dataclass(frozen=True)
class File:
    """What a file of the folder must be."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Shard(File):
    num_tokens: int


@dataclass(frozen=True)
class Manifest:
    vocab_size: int
    end_of_document: int
    dtype: str
    num_documents: int
    tokenizer: File | None
    train: tuple[Shard, ...]
    held_out: tuple[Shard, ...]
    begin_of_text: tuple[int, ...] = ()  # the tokens before each document

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"


def is_prepared(folder: Path) -> bool:
    """Whether the folder is, or was to be, a prepared corpus. A folder of text may have a manifest.json of its own."""
    if any((folder / name).exists() for name in (JOURNAL, shard_name("train", 0))):
        return True
    try:
        with open(folder / MANIFEST, "rb") as file:
            return b'"jaxdist tokens ' in file.read(200)
    except OSError:
        return False


def read_manifest(folder: Path) -> Manifest:
    """The checked manifest of a folder. Raises: ConfigError naming what is wrong in it; no other file is looked at."""
    path = folder / MANIFEST
    what = asked(path)
    if not path.exists():
        raise ConfigError(
            asked(folder),
            f"must hold {MANIFEST}, which is written last, and holds token shards only: it is not whole",
            f"Run the same `{command_text('prepare')}` command again: it continues where it was",
        )
    content = read_object(path, _MAX_MANIFEST_BYTES, lambda reason: ConfigError(what, reason, _remedy()))
    if content.pop("format", None) != FORMAT:
        raise ConfigError(what, f"must be the manifest of a prepared corpus, whose format is {FORMAT!r}", _remedy())
    manifest = Manifest(**fields_of(Manifest, content, what))
    # A name that is no plain file name of this folder could reach any file of the machine.
    names = {TOKENIZER: manifest.tokenizer.name} if manifest.tokenizer else {}
    for split, shards in (("train", manifest.train), ("held_out", manifest.held_out)):
        names |= {shard_name(split, number): shard.name for number, shard in enumerate(shards)}
    for name, found in names.items():
        if name != found:
            raise ConfigError(what, f"must name {name} there, and has {found!r:.80}", _remedy())
    if manifest.dtype not in DTYPES:
        raise ConfigError(what, f"dtype must be one of {', '.join(DTYPES)}, not {manifest.dtype!r:.80}", _remedy())
    for name, tokens in (("end_of_document", (manifest.end_of_document,)), ("begin_of_text", manifest.begin_of_text)):
        if not all(0 <= token < manifest.vocab_size for token in tokens):
            required = f"{name} {tokens} must be of the vocabulary of {manifest.vocab_size}"
            raise ConfigError(what, required, _remedy())
    return manifest


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.npy"


class Prepared(NamedTuple):
    """An opened corpus. tokenizer: "bytes", or the SHA-256 of `tokenizer_file`. end_of_document: a token.
    begin_of_text: the tokens before each document."""

    train: Tokens
    held_out: Tokens
    about: str
    tokenizer: str
    end_of_document: int
    tokenizer_file: Path | None
    begin_of_text: tuple[int, ...]


def open_prepared(folder: Path, vocab_size: int) -> Prepared:
    """Open without reading, but for a vocabulary below that of the tokenizer, which may have tokens that no text has.

    Raises: ConfigError where a token is not of the vocabulary, or naming the file that is missing, cut, longer, or
    another than the manifest says.
    """
    manifest = read_manifest(folder)
    if manifest.tokenizer:
        _check_size(folder, manifest.tokenizer)

    def opened(shard: Shard) -> Part:
        path = folder / shard.name
        _check_size(folder, shard)
        array = open_npy(path)
        if array.dtype != np.dtype(manifest.dtype).newbyteorder("<") or len(array) != shard.num_tokens:
            raise ConfigError(
                asked(path),
                f"must have the manifest's {shard.num_tokens} {manifest.dtype} tokens, not {len(array)} {array.dtype}",
                _remedy(),
            )
        return Part(array, str(path), 0, len(array), masks=manifest.dtype == MASKABLE)

    train, held_out = (
        Tokens([opened(shard) for shard in shards], min(vocab_size, manifest.vocab_size))
        for shards in (manifest.train, manifest.held_out)
    )
    if vocab_size < manifest.vocab_size:
        train.check()
        held_out.check()
    kind = "bytes" if manifest.tokenizer is None else f"BPE tokens, vocabulary {manifest.vocab_size}"
    about = f"{folder}, {manifest.num_documents} documents, {kind}"
    tokenizer, file = "bytes", None
    if manifest.tokenizer is not None:
        tokenizer, file = manifest.tokenizer.sha256, folder / TOKENIZER
    return Prepared(train, held_out, about, tokenizer, manifest.end_of_document, file, manifest.begin_of_text)


def _check_size(folder: Path, file: File) -> None:
    path = folder / file.name
    try:
        # Not through a link, which could lead out of the folder.
        size = os.stat(path, follow_symlinks=False).st_size
        if not path.is_file() or path.is_symlink():
            raise ConfigError(asked(path), "must be a regular file", _remedy())
    except FileNotFoundError as error:
        raise ConfigError(asked(path), "must be there, since the manifest names it, and is not", _remedy()) from error
    if size != file.num_bytes:
        raise ConfigError(asked(path), f"must have the manifest's {file.num_bytes} bytes, and has {size}", _remedy())


def check_prepared(folder: Path, say: Callable[[int], None] = lambda num_bytes: None) -> Manifest:
    """Read every byte of a prepared corpus: hashes, sizes, and that every token is of the vocabulary.

    Args: `say` is called with the bytes that were read since the last call.
    Raises: ConfigError naming the first file that is not what the manifest says.
    """
    manifest = read_manifest(folder)
    open_prepared(folder, manifest.vocab_size)
    for file in [*([manifest.tokenizer] if manifest.tokenizer else []), *manifest.train, *manifest.held_out]:
        found = sha256_of(folder / file.name, say)
        if found != file.sha256:
            raise ConfigError(
                asked(folder / file.name),
                f"must have the manifest's SHA-256, {file.sha256[:16]}..., and has {found[:16]}...: it was changed",
                _remedy(),
            )
    for tokens in open_prepared(folder, manifest.vocab_size)[:2]:
        for _ in tokens.chunks():
            pass
    return manifest


def sha256_of(path: Path, say: Callable[[int], None] = lambda num_bytes: None) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            say(len(block))
    return digest.hexdigest()
