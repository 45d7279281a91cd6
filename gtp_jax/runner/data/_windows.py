"""Windows of a stream of tokens, cut without gaps."""

from __future__ import annotations

import dataclasses

import numpy as np

from ._rows import Rows


@dataclasses.dataclass(frozen=True, eq=False)
class Windows(Rows):
    """Sequences of `seq` tokens and the token after each, cut from a stream without gaps, across documents.

    Window `i` holds the tokens `i * seq` to `(i + 1) * seq`, the last one included and shared with window `i + 1`, so
    that every token but the first is predicted exactly once an epoch.

    Attributes:
        tokens: the stream.
        seq: tokens of a sequence.
        seed: of the order.
        repeat: whether epochs follow each other.
        answers: `(tokens,)` uint8, 0 for tokens that the loss leaves out as targets; none by default.

    Raises:
        ValueError: if `seq` is less than 1, or the stream too short for one window.
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
