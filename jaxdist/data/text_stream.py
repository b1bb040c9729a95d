"""Text as its tokens come: nothing is shown that a later token may change."""

from collections.abc import Sequence

import numpy as np

from jaxdist.data.tokenizer import Tokenizer

CUT = "\ufffd"  # what a character is shown as while bytes of it are missing
CONTEXT = 16  # tokens, at least, that new ones are decoded with: a word's space may depend on them


class TextStream:
    """The text of one row of tokens; it ends at a token of `end`, or before the first of the words in `stop`.

    What a token adds is what the text with it is longer than the text without: decoded alone, the first token of many
    tokenizers would lose its space. prompt: the tokens before the first.
    """

    def __init__(
        self, tokenizer: Tokenizer, end: Sequence[int] = (), stop: Sequence[str] = (), prompt: Sequence[int] = ()
    ):
        self.tokenizer, self.end, self.stop = tokenizer, frozenset(end), tuple(filter(None, stop))
        self.tokens: list[int] = []
        self.text, self.done = "", False
        self._certain = ""  # decoded, and of whole characters
        # Tokens before the end of that, in parts of whole characters: one cut in two can spoil all of a run of bytes.
        self._context = [self._whole_end(prompt)]
        self._waiting: list[int] = []  # and after it

    def add(self, token: int) -> str:
        """The text that is certain now and was not before."""
        if self.done:
            return ""
        if token in self.end:
            return self.close()
        self.tokens.append(token)
        self._waiting.append(token)
        new = self._decoded()
        if new and not new.endswith(CUT):
            self._certain += new
            self._context, self._waiting = [*self._context, self._waiting], []
            while sum(map(len, self._context[1:])) >= CONTEXT:
                del self._context[0]
        whole = self._certain
        if (end := self._first_stop()) < len(whole):
            self.done = True
            return self._up_to(end)
        held_back = max((self._begun(whole, word) for word in self.stop), default=0)
        return self._up_to(len(whole) - held_back)

    def close(self) -> str:
        """What was held back, when no more tokens come."""
        if self.done:
            return ""
        self.done = True
        self._certain += self._decoded()
        return self._up_to(self._first_stop())

    def _first_stop(self) -> int:
        """Where the first stop word begins; without one, the end of the text."""
        found = (at for at in map(self._certain.find, self.stop) if at >= 0)
        return min(found, default=len(self._certain))

    def _decoded(self) -> str:
        """What the waiting tokens add."""
        if not self._waiting:
            return ""
        context = [token for part in self._context for token in part]
        before = self.tokenizer.decode(np.asarray(context)) if context else ""
        whole = self.tokenizer.decode(np.asarray(context + self._waiting))
        # Bytes that are no character may spoil those before them too, which have been shown.
        return whole[len(before) :] if whole.startswith(before) else self.tokenizer.decode(np.asarray(self._waiting))

    def _whole_end(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens of it, at least CONTEXT, that do not begin within a character, which has up to 4 bytes."""
        least = max(0, len(prompt) - CONTEXT)
        starts = range(least, max(-1, least - 4), -1)
        ends = [list(prompt[start:]) for start in starts]
        whole = (end for end in ends if not self.tokenizer.decode(np.asarray(end, np.int64)).startswith(CUT))
        return next(whole, ends[0])

    def _up_to(self, length: int) -> str:
        new = self._certain[len(self.text) : max(length, len(self.text))]
        self.text += new
        return new

    @staticmethod
    def _begun(text: str, word: str) -> int:
        """Characters at the end of the text with which the word may have begun."""
        return next((n for n in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:n])), 0)
