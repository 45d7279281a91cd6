"""Ends rows at stop texts, which may span several tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Decoder(Protocol):
    """Turns tokens into text; for example, a tokenizer of `tokenizers` or `transformers`."""

    def decode(self, tokens: Sequence[int], /) -> str:
        """Returns the text of tokens."""
        ...


class TextStop:
    """Ends a row when the text of its new tokens contains a stop text.

    Args:
        tokenizer: the tokenizer of the tokens.
        prompt: the tokens of the row's prompt, in whose text stop texts do not count.
        texts: the stop texts; any one of them ends the row.

    Attributes:
        ended: whether a stop text has occurred.
    """

    def __init__(self, tokenizer: Decoder, prompt: Sequence[int], texts: Sequence[str]) -> None:
        self._tokenizer, self._tokens, self._texts = tokenizer, [int(token) for token in prompt], texts
        self._begin = len(tokenizer.decode(self._tokens))
        self.ended = False

    def take(self, tokens: Sequence[int]) -> int:
        """Returns how many of the next tokens belong to the row: up to the one that completes a stop text, or all; none
        if the row has ended."""
        if self.ended:
            return 0
        before = len(self._tokens)
        self._tokens += [int(token) for token in tokens]
        self.ended = self._ends(len(self._tokens))
        if not self.ended:
            return len(tokens)
        return next(count for count in range(1, len(tokens) + 1) if self._ends(before + count))

    def _ends(self, count: int) -> bool:
        """Returns whether the text of the first `count` tokens, without the prompt, contains a stop text."""
        text = self._tokenizer.decode(self._tokens[:count])[self._begin :]
        return any(stop in text for stop in self._texts)
