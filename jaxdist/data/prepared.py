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
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdist.commands import command_text
from jaxdist.data.tokens import Part, Tokens, asked, open_npy
from jaxdist.errors import ConfigError

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

    def refuse(what: str):
        raise ConfigError(asked(path), what, _remedy())

    if not path.exists():
        raise ConfigError(
            asked(folder),
            f"must hold {MANIFEST}, which is written last, and holds token shards only: it is not whole",
            f"Run the same `{command_text('prepare')}` command again: it continues where it was",
        )
    with open(path, "rb") as file:
        text = file.read(_MAX_MANIFEST_BYTES + 1)
    if len(text) > _MAX_MANIFEST_BYTES:
        refuse(f"must have at most {_MAX_MANIFEST_BYTES:,} bytes")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        refuse(f"must be JSON ({error})")
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        refuse(f"must be the manifest of a prepared corpus, whose format is {FORMAT!r}")

    def take(holder: object, name: str, kind: type, least: int = 0):
        value: Any = holder.get(name) if isinstance(holder, dict) else None
        if type(value) is not kind or (isinstance(value, int) and value < least):
            refuse(f"{name} must be {'a whole number' if kind is int else kind.__name__}, and it is {value!r:.80}")
        return value

    def take_file(holder: dict) -> dict:
        found = {name: take(holder, name, kind) for name, kind in (("name", str), ("num_bytes", int), ("sha256", str))}
        if not re.fullmatch("[0-9a-f]{64}", found["sha256"]):
            refuse(f"sha256 of {found['name']!r:.80} must be a SHA-256 in hexadecimal")
        return found

    def take_shards(split: str) -> tuple[Shard, ...]:
        shards = tuple(
            Shard(**take_file(shard), num_tokens=take(shard, "num_tokens", int, 1))
            for shard in take(content, split, list)
        )
        for number, shard in enumerate(shards):
            # A name that is no plain file name of this folder could reach any file of the machine.
            if shard.name != shard_name(split, number):
                refuse(f"{split} shard {number} must be {shard_name(split, number)}, and it is {shard.name!r:.80}")
        return shards

    tokenizer = content.get("tokenizer")
    if tokenizer is not None:
        tokenizer = File(**take_file(tokenizer))
        if tokenizer.name != TOKENIZER:
            refuse(f"the tokenizer must be {TOKENIZER}, and it is {tokenizer.name!r:.80}")
    manifest = Manifest(
        vocab_size=take(content, "vocab_size", int, 1),
        end_of_document=take(content, "end_of_document", int),
        dtype=take(content, "dtype", str),
        num_documents=take(content, "num_documents", int),
        tokenizer=tokenizer,
        train=take_shards("train"),
        held_out=take_shards("held_out"),
        begin_of_text=tuple(take(content, "begin_of_text", list) if "begin_of_text" in content else ()),
    )
    for token in manifest.begin_of_text:
        if type(token) is not int or not 0 <= token < manifest.vocab_size:
            refuse(f"begin_of_text must be tokens of the vocabulary of {manifest.vocab_size}, and has {token!r:.80}")
    if manifest.dtype not in DTYPES:
        refuse(f"dtype must be one of {', '.join(DTYPES)}, and it is {manifest.dtype!r:.80}")
    if manifest.end_of_document >= manifest.vocab_size:
        refuse(f"end_of_document {manifest.end_of_document} must be in the vocabulary of {manifest.vocab_size}")
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
    """Open without reading.

    Raises: ConfigError where the vocabulary is too small, or naming the file that is missing, cut, longer, or another
    than the manifest says.
    """
    manifest = read_manifest(folder)
    if vocab_size < manifest.vocab_size:
        raise ConfigError(
            f"{asked(folder)} with vocab_size={vocab_size}",
            f"the vocabulary must be at least {manifest.vocab_size}, with which the corpus was prepared",
            f"Use vocab_size={manifest.vocab_size}",
        )
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
        Tokens([opened(shard) for shard in shards], manifest.vocab_size)
        for shards in (manifest.train, manifest.held_out)
    )
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
