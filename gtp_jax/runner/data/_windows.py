"""Windows of a token stream in a shuffled order that needs no state.

The order of an epoch is a permutation computed place by place: a balanced Feistel network over the next power of four,
walked until it lands within range (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). A
window's number is known from its place alone, in constant memory, and does not depend on a library's generator.
"""

from __future__ import annotations

import dataclasses

import numpy as np

_ROUNDS = 6


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
    """Sequences of `seq` tokens and the token after each, cut from a stream without gaps.

    Window `i` holds the tokens `i * seq` to `(i + 1) * seq`, the last one included and shared with window `i + 1`, so
    that every token but the first is predicted exactly once an epoch. Row `r` of a run is at place `r % len(self)` of
    epoch `r // len(self)`; each epoch has its own order.

    Attributes:
        tokens: the stream.
        seq: tokens of a sequence.
        seed: of the order.
        repeat: whether epochs follow each other. If not, rows past the first epoch are empty: their weights are 0.

    Raises:
        ValueError: if `seq` is less than 1, or the stream too short for one window.
    """

    tokens: np.ndarray
    seq: int
    seed: int = 0
    repeat: bool = True

    def __post_init__(self) -> None:
        if self.seq < 1:
            raise ValueError(f"`seq` is {self.seq}; it must be a whole number of at least 1.")
        if len(self.tokens) < self.seq + 1:
            raise ValueError(
                f"too few tokens: {len(self.tokens)}, but one window of `seq` {self.seq} needs {self.seq + 1}."
            )

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq

    def order(self, rows: np.ndarray) -> np.ndarray:
        """Returns the window of each row of the run."""
        epochs, places = np.divmod(np.asarray(rows, np.uint64), np.uint64(len(self)))
        return _permuted(places, epochs, len(self), self.seed)

    def rows(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Returns rows of the run by number: with a batch of `B`, row `b` of step `s` is `s * B + b`.

        Args:
            rows: `(R,)` numbers.

        Returns:
            `tokens` and `targets`, `(R, seq)` int32, the targets one token later. Without `repeat` also `weights`,
            `(R, seq)` float32: 1, or 0 in rows past the first epoch.
        """
        starts = self.order(rows).astype(np.int64) * self.seq
        window = self.tokens[starts[:, None] + np.arange(self.seq + 1)].astype(np.int32)
        batch: dict[str, np.ndarray] = {"tokens": window[:, :-1], "targets": window[:, 1:]}
        if not self.repeat:
            inside = np.asarray(rows) < len(self)
            batch["weights"] = np.repeat(inside[:, None], self.seq, axis=1).astype(np.float32)
        return batch


def _permuted(places: np.ndarray, epochs: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Images of `places` (all below `size`) under the permutation of their epoch."""
    half = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))  # bits of either half
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = _mixed(_mixed(np.uint64(seed % 2**64)) + epochs)

    def network(values: np.ndarray, keys: np.ndarray) -> np.ndarray:
        left, right = values >> half, values & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (_mixed(keys + _mixed(right + np.uint64(turn << 40))) & mask)
        return left << half | right

    images = network(places, keys)
    while (outside := images >= size).any():  # under 4 tries on average: the domain is at most 4 times too large
        images = np.where(outside, network(images, keys), images)
    return images


def _mixed(values: np.ndarray | np.uint64) -> np.ndarray:
    """Returns SplitMix64's finalizer (Steele, Lea and Flood, OOPSLA 2014): every output bit depends on every input
    bit."""
    bits = np.atleast_1d(values).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ bits >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ bits >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return bits ^ bits >> np.uint64(31)
