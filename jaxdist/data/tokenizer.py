"""Text to tokens and back: bytes, or a tokenizer of the Hugging Face `tokenizers` library.

What stands before and after a text is decided here, for all programs: `begin_of_text` by the post-processor of
tokenizer.json, as in transformers (which does not ask add_bos_token where there is this file), and `end_of_document`.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from jaxdist.commands import command_text, install_text
from jaxdist.errors import ConfigError
from jaxdist.files import read_text_file

END_OF_DOCUMENT = "<|endoftext|>"
CONFIG = "tokenizer_config.json"
MOST_BYTES = 2**28  # of a tokenizer.json; those of today have about 2**24


class Encoded(NamedTuple):
    """A text's tokens, and the offset in the text after the last character of each."""

    tokens: np.ndarray
    stops: np.ndarray


class Tokenizer(Protocol):
    vocab_size: int
    begin_of_text: tuple[int, ...]  # put before every text
    end_of_document: int | None  # None where the tokenizer has no such token
    special: tuple[str, ...]  # names of special tokens, which are text where a text has them
    dtype: str  # the narrowest that holds every token
    identity: str  # equal where tokens mean the same

    def to_bytes(self) -> bytes:
        """What `tokenizer.json` holds; empty where none is needed."""
        ...

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The tokens of each text, without what stands before and after it."""
        ...

    def encode_with_stops(self, texts: list[str]) -> list[Encoded]:
        """The same, with where in its text each token ends."""
        ...

    def decode(self, tokens: np.ndarray) -> str:
        """The text: `decode(encode([text])[0]) == text` for bytes and for byte-level BPE."""
        ...

    def name(self, token: int) -> str:
        """A token for a person."""
        ...


class ByteTokenizer:
    """The UTF-8 bytes of the text; the NUL byte ends a document. A token above 255 is shown as U+FFFD."""

    vocab_size, dtype, identity = 256, "uint8", "bytes"
    begin_of_text: tuple[int, ...] = ()
    end_of_document: int | None = 0
    special: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        return b""

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def encode_with_stops(self, texts: list[str]) -> list[Encoded]:
        return [
            Encoded(tokens, np.repeat(np.arange(1, len(text) + 1), [len(char.encode("utf-8")) for char in text]))
            for text, tokens in zip(texts, self.encode(texts), strict=True)
        ]

    def decode(self, tokens: np.ndarray) -> str:
        # 0xFF is no byte of any UTF-8 text.
        return bytes(np.minimum(tokens, 0xFF).astype(np.uint8).tolist()).decode("utf-8", errors="replace")

    def name(self, token: int) -> str:
        return f"byte {token}"


class BPETokenizer:
    """A tokenizer of the `tokenizers` library, from the text of its tokenizer.json.

    Truncation and padding, which somebody's last call left in the file, are switched off. Args: end_of_document names
    the token after each document; None takes the one that the tokenizer itself puts after a text, the eos_token of
    `config` (a tokenizer_config.json), or <|endoftext|>, the first of these that there is. Raises: ConfigError where
    the library is missing, the text is no tokenizer, encodes at random, or lacks the named token.
    """

    def __init__(self, text: str, path: str, end_of_document: str | None = None, config: dict[str, Any] | None = None):
        library, config = _library(), config or {}
        asked = f"tokenizer={path!r}"
        try:
            inner = library.Tokenizer.from_str(text)
            described = json.loads(text)
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(
                asked,
                f"must be a tokenizer.json ({error})",
                f"Pass a file that Tokenizer.save or `{command_text('prepare')}` wrote",
            ) from error
        _require_function_of_text(asked, described)
        inner.no_truncation()
        inner.no_padding()
        ids = inner.get_vocab(with_added_tokens=True)
        if not ids:
            raise ConfigError(asked, "must have a token", "Use another")
        self._asked = asked
        self._names = {number: name for name, number in ids.items()}
        added = inner.get_added_tokens_decoder().values()
        self.special = tuple(sorted(str(token) for token in added if token.special))
        with _encoding(asked):
            before, after = _around(inner)
        self.begin_of_text = before
        if end_of_document is not None and end_of_document not in ids:
            raise ConfigError(
                f"{asked} with end_of_document={end_of_document!r}",
                "must be a token that the tokenizer has, since it joins the documents",
                f"Name one that it has, such as {', '.join(self.special[:8]) or next(iter(ids), 'none')}",
            )
        ends = [end_of_document, self._names.get(after[0]) if len(after) == 1 else None]
        ends += [_content(config.get("eos_token")), END_OF_DOCUMENT]
        self.end_of_document = next((ids[name] for name in ends if name in ids), None)
        self.vocab_size = 1 + max(ids.values())
        self.dtype = "uint16" if self.vocab_size <= 1 << 16 else "uint32"
        self._text = inner.to_str(pretty=True)
        # Offsets are to be of whole tokens, and what stands around a text is put there by us.
        inner.post_processor = None
        self.identity = hashlib.sha256(inner.to_str().encode("utf-8")).hexdigest()
        # A document that has the text of a special token in it must not end there.
        inner.encode_special_tokens = True
        self._inner = inner

    @classmethod
    def load(cls, path: Path, end_of_document: str | None = None) -> Self:
        """From a tokenizer.json, and the tokenizer_config.json beside it, where there is one."""
        config, beside = {}, path.with_name(CONFIG)
        if beside.is_file():
            try:
                config = json.loads(read_text_file("tokenizer", beside))
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"tokenizer={str(beside)!r}", "must be JSON", "Fetch it again") from error
        text = read_text_file("tokenizer", path, MOST_BYTES)
        return cls(text, str(path), end_of_document, config if isinstance(config, dict) else {})

    @classmethod
    def train(cls, texts: Iterator[str], vocab_size: int) -> Self:
        """A byte-level BPE as GPT-2's: no text is unknown to it, and the same texts give the same tokenizer."""
        cls.check_size(vocab_size)
        library = _library()
        inner = library.Tokenizer(library.models.BPE())
        inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_DOCUMENT],
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        return cls(inner.to_str(pretty=True), "(trained)")

    @staticmethod
    def check_size(vocab_size: int) -> None:
        """Refuse what `train` could not do, and do it before any text is read."""
        _library()
        if vocab_size < 256 + 1:
            raise ConfigError(
                f"vocab_size={vocab_size}",
                f"a byte-level BPE must have the 256 bytes and {END_OF_DOCUMENT} before its first merge",
                "Use vocab_size=257 or more, or tokenizer='bytes'",
            )

    def to_bytes(self) -> bytes:
        return self._text.encode("utf-8")

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        with _encoding(self._asked):
            encodings = self._inner.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, self.dtype) for encoding in encodings]

    def encode_with_stops(self, texts: list[str]) -> list[Encoded]:
        with _encoding(self._asked):
            encodings = self._inner.encode_batch(texts, add_special_tokens=False)
        return [
            Encoded(np.array(found.ids, self.dtype), np.array([stop for _, stop in found.offsets], np.int64))
            for found in encodings
        ]

    def decode(self, tokens: np.ndarray) -> str:
        return self._inner.decode(tokens.tolist(), skip_special_tokens=False)

    def name(self, token: int) -> str:
        return self._names.get(token, f"token {token}")


def with_template(text: bytes, begin: tuple[str, ...]) -> bytes:
    """A tokenizer.json that puts these tokens before a text, for a library that adds them itself."""
    library = _library()
    inner = library.Tokenizer.from_str(text.decode("utf-8"))
    # A space parts the pieces of a template given as one text, and a token may have one in it.
    inner.post_processor = library.processors.TemplateProcessing(
        single=[*begin, "$A"],
        pair=[*begin, "$A", *begin, "$B:1"],
        special_tokens=[(name, inner.token_to_id(name)) for name in dict.fromkeys(begin)],
    )
    return inner.to_str(pretty=True).encode("utf-8")


def join_indifferently(tokenizer: Tokenizer, before: str, after: str) -> bool:
    """Whether the tokens of `before + after` are those of `before` and then others: a text may be cut there."""
    first, whole = tokenizer.encode([before, before + after])
    return np.array_equal(whole[: len(first)], first)


def _around(inner) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens before and after every text, of whatever post-processor."""
    for probe in ("a", "0", *inner.get_vocab()):  # some tokenizers know few characters
        found = inner.encode(probe, add_special_tokens=True)
        inside = [place for place, sequence in enumerate(found.sequence_ids) if sequence is not None]
        if inside:
            return tuple(found.ids[: inside[0]]), tuple(found.ids[inside[-1] + 1 :])
    return (), ()


@contextmanager
def _encoding(asked: str) -> Iterator[None]:
    """Turn what the library raises of a text that its vocabulary lacks into a ConfigError."""
    try:
        yield
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(asked, f"must know every text ({error})", "Give it a token for what is unknown") from error


def _content(token: Any) -> str | None:
    """A special token of a tokenizer_config.json: a text, or an object with one."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _require_function_of_text(asked: str, described: dict) -> None:
    model = described.get("model")
    for name in ("dropout", "alpha", "nbest_size"):
        if isinstance(model, dict) and model.get(name):
            raise ConfigError(
                asked,
                f"the same text must always give the same tokens, and its {name} of {model[name]} draws them at random",
                f"Set {name} of its model to null",
            )


def _library():
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # otherwise off in a process that has forked before
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError(
            "a BPE tokenizer", "the `tokenizers` library must be installed", f"Install it with {install_text('data')}"
        ) from error
    return tokenizers
