"""Text as its tokens come: nothing is shown that a later token may change."""

from collections.abc import Sequence

import numpy as np

from jaxdist.data.tokenizer import Tokenizer

CUT = "\ufffd"  # what a character is shown as while bytes of it are missing


class TextStream:
    """The text of one row of tokens; it ends at a token of `end`, or before the first of the words in `stop`."""

    def __init__(self, tokenizer: Tokenizer, end: Sequence[int] = (), stop: Sequence[str] = ()):
        self.tokenizer, self.end, self.stop = tokenizer, frozenset(end), tuple(filter(None, stop))
        self.tokens: list[int] = []
        self.text, self.done = "", False

    def add(self, token: int) -> str:
        """The text that is certain now and was not before."""
        if self.done:
            return ""
        if token in self.end:
            return self.close()
        self.tokens.append(token)
        whole = self._decoded()
        found = [at for at in map(whole.find, self.stop) if at >= 0]
        if found:
            self.done = True
            return self._up_to(whole, min(found))
        held_back = max((self._begun(whole, word) for word in self.stop), default=0)
        if whole.endswith(CUT):
            held_back = max(held_back, len(whole) - len(whole.rstrip(CUT)))
        return self._up_to(whole, len(whole) - held_back)

    def close(self) -> str:
        """What was held back, when no more tokens come."""
        if self.done:
            return ""
        self.done = True
        whole = self._decoded()
        return self._up_to(whole, len(whole))

    def _decoded(self) -> str:
        return self.tokenizer.decode(np.asarray(self.tokens)) if self.tokens else ""

    def _up_to(self, whole: str, length: int) -> str:
        new = whole[len(self.text) : max(length, len(self.text))]
        self.text += new
        return new

    @staticmethod
    def _begun(text: str, word: str) -> int:
        """Characters at the end of the text with which the word may have begun."""
        return next((n for n in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:n])), 0)
