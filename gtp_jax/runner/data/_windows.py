"""Cuts a stream of tokens into windows without gaps."""

from __future__ import annotations

import dataclasses

import numpy as np

from ._rows import Rows


@dataclasses.dataclass(frozen=True, eq=False)
class Windows(Rows):
    """Windows of `seq` tokens and their targets, cut from a stream without gaps, across documents.

    Window `i` holds the tokens `i * seq` to `(i + 1) * seq`, inclusive. It shares the last one with window `i + 1`, so
    that every token except the first is predicted exactly once per epoch.

    Attributes:
        tokens: the stream.
        seq: the number of tokens per sequence.
        seed: the seed of the order.
        repeat: whether the rows continue after the first epoch.
        answers: `(tokens,)` uint8, 0 for tokens that the loss leaves out as targets. By default, all count.

    Raises:
        ValueError: if `seq` is less than 1, or the stream is too short for one window.
    """

    tokens: np.ndarray
    seq: int
    seed: int = 0
    repeat: bool = True
    answers: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.seq < 1:
            raise ValueError(f"`seq` is {self.seq}; it must be a whole number of at least 1.")
        if len(self.tokens) < self.seq + 1:
            raise ValueError(
                f"too few tokens: {len(self.tokens)}, but one window of `seq` {self.seq} needs {self.seq + 1}."
            )

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq

    def cut(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        places = numbers[:, None] * self.seq + np.arange(self.seq + 1)
        window = self.tokens[places].astype(np.int32)
        targets = window[:, 1:]
        if self.answers is not None:
            targets = np.where(self.answers[places[:, 1:]], targets, -1)
        return {"tokens": window[:, :-1], "targets": targets}
