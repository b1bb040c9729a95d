"""Turn text into token shards that open in an instant, whatever their size.

python -m experiments.prepare --data FOLDER --out DIR --vocab-size 8192     train a BPE and encode with it
python -m experiments.prepare --data FOLDER --out DIR --tokenizer FILE      encode with a tokenizer.json
python -m experiments.prepare --data FOLDER --out DIR --tokenizer bytes     bytes are the tokens
python -m experiments.prepare --data chats.jsonl --supervised ...           prompts are read, answers are predicted
python -m experiments.prepare --check DIR                                   read everything and compare the hashes

A killed run continues when the same command is run again, and gives the same bytes. Nothing has its final name before
all of it is on the disk, and the manifest, without which a folder is not opened, comes last.
"""

import dataclasses
import hashlib
import io
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from jaxdist.data.batches import held_out_names, load_corpus
from jaxdist.data.prepared import (
    JOURNAL,
    MANIFEST,
    MASKABLE,
    SPLITS,
    TOKENIZER,
    File,
    Manifest,
    Shard,
    check_prepared,
    is_prepared,
    sha256_of,
    shard_name,
)
from jaxdist.data.tokenizer import END_OF_DOCUMENT, BPETokenizer, ByteTokenizer, Tokenizer, join_indifferently
from jaxdist.data.tokens import TokenDtype, asked, decode_text, find_files, masked
from jaxdist.errors import ConfigError, is_utf8, require_positive
from jaxdist.files import BYTE_ORDER_MARK, read_object, write_whole
from jaxdist.runtime.run_folder import LOCK, held

from .entry import flag_word, run_program

PIECE_BYTES = 1 << 20  # of text encoded as one; a longer document is cut at line ends, where that changes no token
BATCH_BYTES = 8 << 20  # of text given to the tokenizer's threads together
CONTEXT_BYTES = 1 << 10  # of text before and after a cut that may change the tokens there
MOST_CUTS_TRIED = 1 << 10


@dataclass(frozen=True)
class PrepareFlags:
    """Turn a folder of text into token shards, a tokenizer and a manifest."""

    data: str | None = None
    """A UTF-8 text file or a folder of them. A file is a document; a .jsonl file has one in the "text" of each line."""
    out: str | None = None
    """Folder to make. An unfinished one continues."""
    vocab_size: int | None = None
    """Train a byte-level BPE of this size on the training text."""
    tokenizer: str | None = None
    """A tokenizer.json or its folder to encode with, or `bytes`."""
    end_of_document: str | None = None
    """The token of --tokenizer that is put after each document. Default: the one that it puts after a text itself, its
    eos_token, or <|endoftext|>. Before each document stands what the tokenizer puts there, such as <s>."""
    supervised: bool = False
    """For fine-tuning on answers: each line of a .jsonl has a "prompt", which is read, and an "answer", which is
    predicted."""
    shard_mb: int = 64
    """MB of text in a shard: what a killed run does again at most."""
    check: str | None = None
    """A prepared folder, or a .npy or .bin, to read whole and check; nothing is written."""
    token_dtype: TokenDtype | None = None
    """With --check: numbers in a .bin, where they are not plainly uint16."""


@dataclass(frozen=True)
class Range:
    """Bytes start .. stop-1 of a file. first: where their document begins. ends: whether it is over after them."""

    name: str
    first: int
    start: int
    stop: int
    ends: bool


def main(flags: PrepareFlags, console: Console) -> int:
    try:
        return check(flags, console) if flags.check is not None else prepare(flags, console)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or flags.out or flags.check}",
            f"it cannot be read or written ({error.strerror})",
            "Make room or give access, then run the same command again: it continues where it was",
        ) from error


def prepare(flags: PrepareFlags, console: Console) -> int:
    # ---- check everything ----
    if flags.data is None or not flags.out:
        raise ConfigError(
            "no --data or no --out given",
            "both must be given: text is read from one and tokens are written to the other",
            "Pass --data FOLDER --out DIR, or --check DIR",
        )
    require_positive("shard_mb", flags.shard_mb)
    root, out = Path(flags.data), Path(flags.out)
    require_there("--data", flags.data)
    tokenizer = given_tokenizer(flags)
    if root.is_file():
        root, names = root.parent, [root.name]
    else:
        names = find_files(root)
    if Path(flags.data).resolve() in out.resolve().parents:
        raise ConfigError(
            f"--out {flags.out}", "must be outside --data, which is read as text", "Name a folder elsewhere"
        )
    stats = {name: (root / name).stat() for name in names}
    sizes = {name: stat.st_size for name, stat in stats.items() if stat.st_size}
    if not sizes:
        raise ConfigError(
            asked(flags.data), "must have text in it", "Pass UTF-8 text, a file or a folder with at least one"
        )
    if flags.supervised and (other := [name for name in sizes if not has_lines(Path(name))]):
        raise ConfigError(
            f"--supervised with {other[0]}", "prompts and answers must be lines of .jsonl files", "Name those alone"
        )
    plan = {
        "files": [[name, stats[name].st_size, stats[name].st_mtime_ns] for name in sizes],
        "shard_mb": flags.shard_mb,
        "vocab_size": flags.vocab_size,
        "tokenizer": tokenizer and hashlib.sha256(tokenizer.to_bytes()).hexdigest(),
        "end_of_document": tokenizer.name(tokenizer.end_of_document) if flags.tokenizer else END_OF_DOCUMENT,
        "begin_of_text": [] if tokenizer is None else list(tokenizer.begin_of_text),
    } | ({"supervised": True} if flags.supervised else {})

    def warn(text: str) -> None:
        console.print(f"[yellow]warning:[/] {escape(text)}", soft_wrap=True)

    with held(out, "out", warn):
        try:
            prepare_into(out, root, sizes, plan, tokenizer, console)
        finally:
            (out / LOCK).unlink(missing_ok=True)
    return 0


def prepare_into(
    out: Path,
    root: Path,
    sizes: dict[str, int],
    plan: dict,
    tokenizer: Tokenizer | None,
    console: Console,
) -> None:
    """Begin, or go on with, the preparation that `plan` names."""
    journal, unit_bytes = open_journal(out, plan), plan["shard_mb"] * 1_000_000
    if tokenizer is None:
        units = cut_units(root, sizes, unit_bytes, None)
        tokenizer = train_tokenizer(
            root, out, units["train"], plan["vocab_size"], plan.get("supervised", False), console
        )
    elif tokenizer.to_bytes():
        write_whole(out / TOKENIZER, tokenizer.to_bytes())
    units = cut_units(root, sizes, unit_bytes, tokenizer)
    if journal["shards"]:
        console.print(f"continuing: {len(journal['shards'])} of {sum(map(len, units.values()))} shards are done")
    before = " ".join(map(tokenizer.name, tokenizer.begin_of_text)) or "nothing"
    after = tokenizer.name(tokenizer.end_of_document)
    console.print(f"each document has {escape(before)} before it and {escape(after)} after it", soft_wrap=True)
    shards = write_shards(root, out, units, tokenizer, journal, console)

    train, held_out = (sum(shard.num_tokens for shard in shards[split]) for split in SPLITS)
    if min(train, held_out) < 2:
        said = f"{train:,} + {held_out:,} held-out tokens"
        raise ConfigError(said, "each must be 2 or more, a token and its target", "Give more text")

    # ---- the manifest makes it whole ----
    text = tokenizer.to_bytes()
    manifest = Manifest(
        vocab_size=tokenizer.vocab_size,
        end_of_document=tokenizer.end_of_document,
        dtype=MASKABLE if plan.get("supervised") else tokenizer.dtype,
        num_documents=sum(done["num_documents"] for done in journal["shards"].values()),
        tokenizer=File(TOKENIZER, len(text), hashlib.sha256(text).hexdigest()) if text else None,
        train=tuple(shards["train"]),
        held_out=tuple(shards["held_out"]),
        begin_of_text=tokenizer.begin_of_text,
    )
    write_whole(out / MANIFEST, manifest.to_json().encode())
    (out / JOURNAL).unlink()
    console.print(
        f"[bold]done[/]: {train:,} + {held_out:,} held-out tokens of {manifest.num_documents:,} documents; train with\n"
        f"  --data {escape(str(out))} --vocab-size {manifest.vocab_size}",
        soft_wrap=True,
    )


def require_there(flag: str, path: str) -> None:
    if not Path(path).exists():
        raise ConfigError(f"{flag} {path}", "there is no file or folder of that name", "Name one")


def check(flags: PrepareFlags, console: Console) -> int:
    path = Path(flags.check)
    require_there("--check", flags.check)
    used = {"check"} if is_prepared(path) else {"check", "vocab_size", "token_dtype"}
    for field in dataclasses.fields(flags):
        if field.name not in used and (given := getattr(flags, field.name)) != field.default:
            why = "the folder says itself what is in it" if is_prepared(path) else "it is about text to prepare"
            raise ConfigError(f"{flag_word(field.name, given)} with --check", why, "Leave it out")
    if is_prepared(path):
        with _progress(console) as progress:
            total = sum(entry.stat().st_size for entry in path.iterdir())
            task = progress.add_task("check", total=total)
            manifest = check_prepared(path, lambda num_bytes: progress.advance(task, num_bytes))
        tokens = sum(shard.num_tokens for split in (manifest.train, manifest.held_out) for shard in split)
        console.print(f"[bold]whole[/]: {tokens:,} tokens, every file as the manifest says, none out of the vocabulary")
        return 0
    if flags.vocab_size is None:
        raise ConfigError(
            f"--check {flags.check}",
            "the size of its vocabulary must be given, as it is no prepared folder",
            "Pass --vocab-size too",
        )
    corpus = load_corpus(flags.check, flags.vocab_size, flags.token_dtype)
    for tokens in (corpus.sources[0].train, corpus.sources[0].held_out):
        for _ in tokens.chunks():
            pass
    console.print(f"[bold]whole[/]: {corpus.num_train + corpus.num_held_out:,} tokens, none out of the vocabulary")
    return 0


def given_tokenizer(flags: PrepareFlags) -> Tokenizer | None:
    """The tokenizer that the flags name; None where one is to be trained."""
    if (flags.vocab_size is None) == (flags.tokenizer is None):
        raise ConfigError(
            "--vocab-size and --tokenizer",
            "exactly one of them must say how text becomes tokens",
            "Pass --vocab-size N to train a BPE, or --tokenizer with a tokenizer.json or `bytes`",
        )
    if flags.tokenizer == "bytes":
        if flags.end_of_document is not None:
            asked_for = f"--end-of-document {flags.end_of_document}"
            raise ConfigError(asked_for, "must be left out: the NUL byte ends documents of bytes", "Leave it out")
        return ByteTokenizer()
    if flags.tokenizer is not None:
        path = Path(flags.tokenizer)
        found = BPETokenizer.load(path / TOKENIZER if path.is_dir() else path, flags.end_of_document)
        if found.end_of_document is None:
            asked_for = f"--tokenizer {flags.tokenizer}"
            reason = "documents are joined by a token, and it must say with which of its tokens a text ends"
            raise ConfigError(asked_for, reason, "Name one with --end-of-document")
        return found
    if flags.end_of_document not in (None, END_OF_DOCUMENT):
        raise ConfigError(
            f"--end-of-document {flags.end_of_document}",
            f"must be {END_OF_DOCUMENT}, with which a BPE that is trained here ends documents",
            "Leave it out",
        )
    BPETokenizer.check_size(flags.vocab_size)
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Cutting the text
# ---------------------------------------------------------------------------------------------------------------------


def cut_units(
    root: Path, sizes: dict[str, int], unit_bytes: int, tokenizer: Tokenizer | None
) -> dict[str, list[list[Range]]]:
    """For each split, the text of each of its shards: ranges of files, about `unit_bytes` together.

    Files are split as `load_corpus` does, so that a corpus is split alike whether it is prepared or not. A single file
    holds out its last tenth, from a line's start on. tokenizer: a document is cut only where that changes no token;
    None, while there is none, cuts at lines.
    """
    names = list(sizes)
    if len(names) == 1:
        [(name, size)] = sizes.items()
        cut = line_start(root / name, size * 9 // 10, size)
        wholes = {"train": [(name, 0, cut)], "held_out": [(name, cut, size)]}
    else:
        held_out = held_out_names(names)
        wholes = {split: [] for split in SPLITS}
        for name in names:
            wholes["held_out" if name in held_out else "train"].append((name, 0, sizes[name]))

    units: dict[str, list[list[Range]]] = {}
    for split, parts in wholes.items():
        unit, filled, units[split] = [], 0, []
        for name, first, stop in parts:
            start = first
            while start < stop:
                end = cut_after(root / name, first, min(start + unit_bytes - filled, stop), stop, tokenizer)
                unit.append(Range(name, first, start, end, ends=end == stop))
                filled += end - start
                start = end
                if filled >= unit_bytes:
                    units[split].append(unit)
                    unit, filled = [], 0
        if unit:
            units[split].append(unit)
    return units


def cut_after(path: Path, first: int, position: int, stop: int, tokenizer: Tokenizer | None) -> int:
    """The first start of a line at `position` or after it where the document from `first` to `stop` can be cut so that
    no token changes; `stop` where there is none among the next lines."""
    for _ in range(MOST_CUTS_TRIED):
        position = line_start(path, position, stop)
        if position == stop or tokenizer is None or has_lines(path):
            return position
        before, after = text_around(path, first, position, stop)
        if join_indifferently(tokenizer, before, after):
            return position
        position += 1
    return stop


def text_around(path: Path, first: int, position: int, stop: int) -> tuple[str, str]:
    """About CONTEXT_BYTES of a document's text before and after a position, in whole characters."""
    start = max(position - CONTEXT_BYTES, first)
    with open(path, "rb") as file:
        file.seek(start)
        before = file.read(position - start)
        after = file.read(min(CONTEXT_BYTES, stop - position))
    before = before[_continuation_bytes(before) :]
    return before.decode("utf-8", errors="ignore"), after.decode("utf-8", errors="ignore")


def line_start(path: Path, position: int, size: int) -> int:
    """The first start of a line at `position` or after it, at most `size`; of a character where a text has no lines."""
    if not 0 < position < size:
        return 0 if position <= 0 else size
    with open(path, "rb") as file:
        file.seek(position - 1)
        if has_lines(path):
            file.readline()
            return min(file.tell(), size)
        text = file.read(PIECE_BYTES)
    newline = text.find(b"\n")
    if newline >= 0 and position + newline < size:
        return position + newline
    return position + _continuation_bytes(text[1:])


def _continuation_bytes(text: bytes) -> int:
    """How many bytes at the start are the rest of a UTF-8 character that began before."""
    return next((count for count, byte in enumerate(text[:4]) if byte & 0xC0 != 0x80), len(text[:4]))


class Piece(NamedTuple):
    """Text that is encoded as one. begins, ends: a document is new before it, and over after it. context: the text
    before it, where its document began earlier. prompt: so many of its characters are read and not predicted; None
    where prompts are not told from answers."""

    text: str
    begins: bool
    ends: bool
    context: str = ""
    prompt: int | None = None


def has_lines(path: Path) -> bool:
    """Whether a file has a document in each line."""
    return path.suffix.lower() == ".jsonl"


def read_pieces(
    root: Path, part: Range, supervised: bool = False, tokenizer: Tokenizer | None = None
) -> Iterator[Piece]:
    """The text in order; no piece is much longer than PIECE_BYTES but a JSON line's, or one that cannot be cut."""
    path = root / part.name
    with open(path, "rb") as file:
        file.seek(part.start)
        offset = part.start
        if has_lines(path):
            while offset < part.stop:
                line = file.readline()
                if not line:
                    raise ConfigError(asked(path), "must not be cut while it is read", "Run the same command again")
                if line.strip():
                    yield document_of(path, line, offset, supervised)
                offset += len(line)
            return
        while offset < part.stop:
            end = cut_after(path, part.first, min(offset + PIECE_BYTES, part.stop), part.stop, tokenizer)
            text = file.read(end - offset)
            if len(text) < end - offset:
                raise ConfigError(asked(path), "must not be cut while it is read", "Run the same command again")
            begins = offset == part.first
            context = "" if begins or tokenizer is None else text_around(path, part.first, offset, offset)[0]
            yield Piece(decode_text(path, text, offset), begins, part.ends and end == part.stop, context)
            offset = end


def document_of(path: Path, line: bytes, offset: int, supervised: bool) -> Piece:
    names = ("prompt", "answer") if supervised else ("text",)
    try:
        found = json.loads(decode_text(path, line, offset).removeprefix(BYTE_ORDER_MARK))
        texts = [found[name] for name in names]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        texts = [None]
    if not all(isinstance(text, str) and is_utf8(text) for text in texts):  # an escape can be half a character
        wanted = " and ".join(f'"{name}"' for name in names)
        raise ConfigError(
            asked(path),
            f"each line of a .jsonl must be an object with {wanted}, and the line at offset {offset} is not",
            "Fix or remove the line" if supervised else "Fix or remove the line; prompts and answers: --supervised",
        )
    return Piece("".join(texts), True, True, prompt=len(texts[0]) if supervised else None)


# ---------------------------------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------------------------------


def open_journal(out: Path, plan: dict) -> dict:
    """The journal of what is done already: {"plan": ..., "shards": {name: sizes and hash}}. Raises: ConfigError for
    another folder."""
    asked_out = f"--out {os.fspath(out)!r}"
    path = out / JOURNAL
    if path.exists():
        bad = ConfigError(asked_out, f"its {JOURNAL} must be whole", "Remove the folder and begin again")
        journal = read_object(path, 2**30, lambda _: bad)
        if not (isinstance(journal.get("plan"), dict) and isinstance(journal.get("shards"), dict)):
            raise bad
        if journal["plan"] != plan:
            both = {**plan, **journal["plan"]}
            different = ", ".join(name for name in both if journal["plan"].get(name) != plan.get(name))
            raise ConfigError(
                asked_out,
                f"must hold the beginning of the same preparation: {different} changed since",
                "Give the same flags and files to continue it, or choose another folder",
            )
        return journal
    if is_prepared(out):
        raise ConfigError(asked_out, "must not hold a prepared corpus yet", "Choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    if any(not entry.name.endswith(".part") and entry.name != LOCK for entry in out.iterdir()):
        raise ConfigError(asked_out, "must hold nothing else", "Choose an empty folder or a new one")
    journal = {"plan": plan, "shards": {}}
    write_whole(path, json.dumps(journal).encode())
    return journal


def train_tokenizer(
    root: Path, out: Path, units: list[list[Range]], vocab_size: int, supervised: bool, console: Console
) -> BPETokenizer:
    """The BPE of the training text; the one in the folder where a run before this one had trained it."""
    path = out / TOKENIZER
    if path.exists():
        return BPETokenizer.load(path)
    with _progress(console) as progress:
        task = progress.add_task("learn", total=sum(part.stop - part.start for unit in units for part in unit))

        def texts() -> Iterator[str]:
            for part in itertools.chain.from_iterable(units):
                for piece in read_pieces(root, part, supervised):
                    yield piece.text
                progress.advance(task, part.stop - part.start)

        tokenizer = BPETokenizer.train(texts(), vocab_size)
    write_whole(path, tokenizer.to_bytes())
    if tokenizer.vocab_size < vocab_size:
        console.print(
            f"[yellow]note:[/] the text gave {tokenizer.vocab_size} tokens, fewer than --vocab-size {vocab_size}"
        )
    return tokenizer


def write_shards(
    root: Path, out: Path, units: dict[str, list[list[Range]]], tokenizer: Tokenizer, journal: dict, console: Console
) -> dict[str, list[Shard]]:
    """Encode each unit into its shard, passing over those that the journal has and the disk confirms."""
    shards: dict[str, list[Shard]] = {split: [] for split in SPLITS}
    num_within = 0
    with _progress(console) as progress:
        total = sum(part.stop - part.start for split in SPLITS for unit in units[split] for part in unit)
        task = progress.add_task("encode", total=total)
        for split in SPLITS:
            for number, unit in enumerate(units[split]):
                name = shard_name(split, number)
                done = journal["shards"].get(name)
                if not (done and (out / name).exists() and sha256_of(out / name) == done["sha256"]):
                    supervised = journal["plan"].get("supervised", False)
                    tokens, num_documents, within = encode_unit(root, unit, tokenizer, supervised)
                    num_within += within
                    content = npy_bytes(tokens)
                    write_whole(out / name, content)
                    done = {
                        "num_bytes": len(content),
                        "sha256": hashlib.sha256(content).hexdigest(),
                        "num_tokens": len(tokens),
                        "num_documents": num_documents,
                    }
                    journal["shards"][name] = done
                    write_whole(out / JOURNAL, json.dumps(journal).encode())
                shards[split].append(Shard(name, done["num_bytes"], done["sha256"], done["num_tokens"]))
                progress.advance(task, sum(part.stop - part.start for part in unit))
    if num_within:
        console.print(
            f"[yellow]note:[/] {num_within} answers begin within a token of their prompt, which is predicted whole; "
            "where text is generated, the prompt's tokens are others. End prompts where a word ends",
            soft_wrap=True,
        )
    return shards


def encode_unit(root: Path, unit: list[Range], tokenizer: Tokenizer, supervised: bool) -> tuple[np.ndarray, int, int]:
    """(the unit's tokens, each document between what the tokenizer puts there; the number of documents that end in it;
    how many answers begin within a token of their prompt)."""
    dtype = MASKABLE if supervised else tokenizer.dtype
    begin, end = np.array(tokenizer.begin_of_text, dtype), np.array([tokenizer.end_of_document], dtype)
    found: list[np.ndarray] = []
    num_documents = num_within = 0
    for batch in batched_pieces(root, unit, supervised, tokenizer):
        for piece, tokens, prompt in encoded(batch, tokenizer):
            if piece.begins:
                found.append(masked(begin) if supervised else begin)
            if piece.prompt is not None:
                num_prompt = int(np.searchsorted(prompt, piece.prompt, side="right"))
                num_within += num_prompt < len(prompt) and max([0, *prompt[:num_prompt]]) < piece.prompt
                found.append(masked(tokens[:num_prompt]))
                tokens = tokens[num_prompt:]
            found.append(tokens.astype(dtype))
            if piece.ends:
                found.append(end)
            num_documents += piece.ends
    return np.concatenate(found or [end[:0]]), num_documents, num_within


def encoded(batch: list[Piece], tokenizer: Tokenizer) -> Iterator[tuple[Piece, np.ndarray, np.ndarray]]:
    """(piece, its tokens, where in its text each ends). What came before a piece is encoded with it and left out."""
    if batch[0].prompt is not None:
        yield from ((p, *e) for p, e in zip(batch, tokenizer.encode_with_stops([p.text for p in batch]), strict=True))
        return
    wholes = tokenizer.encode([piece.context + piece.text for piece in batch])
    contexts = tokenizer.encode([piece.context for piece in batch])
    for piece, whole, before in zip(batch, wholes, contexts, strict=True):
        if not np.array_equal(whole[: len(before)], before):
            raise RuntimeError(f"the text after {piece.context[-80:]!r} was cut within a token")
        yield piece, whole[len(before) :], np.zeros(0)


def batched_pieces(root: Path, unit: list[Range], supervised: bool, tokenizer: Tokenizer) -> Iterator[list[Piece]]:
    batch, size = [], 0
    for part in unit:
        for piece in read_pieces(root, part, supervised, tokenizer):
            batch.append(piece)
            size += len(piece.text)
            if size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def npy_bytes(tokens: np.ndarray) -> bytes:
    """A .npy, little-endian on every machine."""
    file = io.BytesIO()
    np.lib.format.write_array(file, tokens.astype(tokens.dtype.newbyteorder("<")), allow_pickle=False)
    return file.getvalue()


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)


if __name__ == "__main__":
    run_program(PrepareFlags, main, "prepare")
