"""Decodes tokens that arrive a few at a time."""

from __future__ import annotations

from collections.abc import Sequence

from ._tokens import Tokenizer

_HALF = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """The text that tokens add to a prompt, returned as soon as later tokens cannot change it.

    Args:
        tokenizer: the tokenizer of the tokens.
        prompt: the tokens of the prompt.
        stop: texts that end the generated text; they are left out of it.

    Attributes:
        ended: whether a text of `stop` has occurred.

    Raises:
        ValueError: if a text of `stop` is empty.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._tokens, self._stop = tokenizer, [int(token) for token in prompt], tuple(stop)
        if "" in self._stop:
            raise ValueError(
                f"`stop` is {list(stop)}; its texts must have at least one character. Leave out the empty ones."
            )
        self._begin = len(tokenizer.decode(self._tokens))
        self._given = 0
        self.ended = False

    def add(self, tokens: Sequence[int]) -> str:
        """Returns the new text that is final once these tokens are added.

        Holds back characters whose bytes may be incomplete, and text that may be the beginning of a text of `stop`.
        """
        self._tokens += [int(token) for token in tokens]
        text = self._text()
        certain = len(text.rstrip(_HALF)) if not self.ended else len(text)
        if not self.ended:
            certain = min([certain, *(certain - _overlap(text[:certain], stop) for stop in self._stop)])
        return self._give(text[:certain])

    def end(self) -> str:
        """Returns the rest of the text."""
        return self._give(self._text())

    def _text(self) -> str:
        text = self._tokenizer.decode(self._tokens)[self._begin :]
        ends = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        self.ended = bool(ends)
        return text[: min(ends)] if ends else text

    def _give(self, text: str) -> str:
        new, self._given = text[self._given :], max(self._given, len(text))
        return new


def _overlap(text: str, stop: str) -> int:
    """Returns the number of characters at the end of `text` that are the beginning of `stop`."""
    return next((size for size in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:size])), 0)
