"""Texts that end a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Decoder(Protocol):
    """What turns tokens into text: a tokenizer of `tokenizers` or of `transformers`, for instance."""

    def decode(self, tokens: Sequence[int], /) -> str:
        """Returns the text of tokens."""
        ...


class TextStop:
    """The end of a row by a text that its new tokens spell.

    Args:
        tokenizer: of the tokens.
        prompt: the row's, whose text does not count.
        texts: of which one ends the row.

    Attributes:
        ended: whether one of them has come.
    """

    def __init__(self, tokenizer: Decoder, prompt: Sequence[int], texts: Sequence[str]) -> None:
        self._tokenizer, self._tokens, self._texts = tokenizer, [int(token) for token in prompt], texts
        self._begin = len(tokenizer.decode(self._tokens))
        self.ended = False

    def take(self, tokens: Sequence[int]) -> int:
        """Returns how many of the next tokens the row has: all, or those up to the one that completes a text."""
        if self.ended:
            return 0
        before = len(self._tokens)
        self._tokens += [int(token) for token in tokens]
        self.ended = self._ends(len(self._tokens))
        if not self.ended:
            return len(tokens)
        return next(count for count in range(1, len(tokens) + 1) if self._ends(before + count))

    def _ends(self, count: int) -> bool:
        """Says whether the first tokens spell one of the texts."""
        text = self._tokenizer.decode(self._tokens[:count])[self._begin :]
        return any(stop in text for stop in self._texts)
