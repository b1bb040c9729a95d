"""Text to tokens and back: bytes, or a byte-pair encoding of the Hugging Face `tokenizers` library."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, Self

import numpy as np

from jaxdist.commands import command_text, install_text
from jaxdist.errors import ConfigError
from jaxdist.files import read_text_file

END_OF_DOCUMENT = "<|endoftext|>"
MOST_BYTES = 2**28  # of a tokenizer.json; those of today have about 2**24


class Tokenizer(Protocol):
    vocab_size: int
    end_of_document: int
    dtype: str  # the narrowest that holds every token

    def to_bytes(self) -> bytes:
        """What `tokenizer.json` holds; empty where none is needed."""
        ...

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The tokens of each text, none of them the end of a document."""
        ...

    def decode(self, tokens: np.ndarray) -> str:
        """The text: `decode(encode([text])[0]) == text` for bytes and for byte-level BPE."""
        ...


class ByteTokenizer:
    """The UTF-8 bytes of the text; the NUL byte ends a document."""

    vocab_size, end_of_document, dtype = 256, 0, "uint8"

    def to_bytes(self) -> bytes:
        return b""

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def decode(self, tokens: np.ndarray) -> str:
        return bytes(tokens.tolist()).decode("utf-8", errors="replace")


class BPETokenizer:
    """A tokenizer of the `tokenizers` library, from the text of its tokenizer.json.

    Raises: ConfigError where the library is missing, the text is no tokenizer, or it lacks `end_of_document`
    (None where no documents are to be joined). begin_of_text: what it puts before every text, such as <s>.
    """

    def __init__(self, text: str, path: str, end_of_document: str | None = END_OF_DOCUMENT):
        library = _library()
        asked = f"tokenizer={path!r}"
        try:
            self._inner = library.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(
                asked,
                f"it is no tokenizer.json ({error})",
                f"Pass a file that Tokenizer.save or `{command_text('prepare')}` wrote",
            ) from error
        # A document that has the text of a special token in it must not end there.
        self._inner.encode_special_tokens = True
        ids = self._inner.get_vocab(with_added_tokens=True)
        if end_of_document is not None and end_of_document not in ids:
            special = sorted(str(token) for token in self._inner.get_added_tokens_decoder().values())
            raise ConfigError(
                f"{asked} with end_of_document={end_of_document!r}",
                "documents are joined by an end-of-document token, and the tokenizer has none of this name",
                f"Name one that it has, such as {', '.join(special[:8]) or next(iter(ids), 'none')}",
            )
        self.end_of_document = ids.get(end_of_document)
        self.begin_of_text = tuple(self._inner.encode("", add_special_tokens=True).ids)
        self.vocab_size = 1 + max(ids.values())
        self.dtype = "uint16" if self.vocab_size <= 1 << 16 else "uint32"

    @classmethod
    def load(cls, path: Path, end_of_document: str | None = END_OF_DOCUMENT) -> Self:
        return cls(read_text_file("tokenizer", path, MOST_BYTES), str(path), end_of_document)

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
                f"a byte-level BPE has the 256 bytes and {END_OF_DOCUMENT} before its first merge",
                "Use vocab_size=257 or more, or tokenizer='bytes'",
            )

    def to_bytes(self) -> bytes:
        return self._inner.to_str(pretty=True).encode("utf-8")

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        encodings = self._inner.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, self.dtype) for encoding in encodings]

    def decode(self, tokens: np.ndarray) -> str:
        return self._inner.decode(tokens.tolist(), skip_special_tokens=False)


def _library():
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # otherwise off in a process that has forked before
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError(
            "a BPE tokenizer", "it needs the `tokenizers` library", f"Install it with {install_text('data')}"
        ) from error
    return tokenizers
