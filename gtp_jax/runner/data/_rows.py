"""Rows of tokens in a shuffled order that needs no state.

The order of an epoch is a permutation computed place by place: a balanced Feistel network over the next power of four,
applied until the result is within range (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). A
row's number is computed from its place alone, in constant memory, and does not depend on a library's generator.
"""

from __future__ import annotations

import abc

import numpy as np

_ROUNDS = 6


class Rows(abc.ABC):
    """The rows of a run, by number.

    Row `r` is at place `r % len(self)` of epoch `r // len(self)`. Each epoch has its own order. A row depends only on
    the text, the seed and its number.

    Attributes:
        seq: the number of tokens per row.
        seed: the seed of the order.
        repeat: whether the rows continue after the first epoch. If not, the rows past it have weights of 0.
    """

    seq: int
    seed: int = 0
    repeat: bool = True

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of rows per epoch."""

    @abc.abstractmethod
    def cut(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Returns rows by their number in the text.

        Args:
            numbers: `(R,)` int64, each below `len(self)`.

        Returns:
            `tokens` and `targets`, `(R, seq)` int32. Targets are one token later than tokens; the loss leaves out
            targets of -1. Packed documents also have `segment_ids`, `(R, seq)` int32, one id for each document of a
            row.
        """

    @property
    def kinds(self) -> dict[str, type]:
        """The names of the arrays that `rows` returns, and their dtypes."""
        return {"tokens": np.int32, "targets": np.int32, **({} if self.repeat else {"weights": np.float32})}

    def order(self, rows: np.ndarray) -> np.ndarray:
        """Returns the place in the text of each row of the run, `(R,)` uint64."""
        epochs, places = np.divmod(np.asarray(rows, np.uint64), np.uint64(len(self)))
        return _permuted(places, epochs, len(self), self.seed)

    def rows(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Returns rows of the run by number: with a batch of `B`, row `b` of step `s` is `s * B + b`.

        Args:
            rows: `(R,)` numbers.

        Returns:
            What `cut` returns. Without `repeat`, also `weights`, `(R, seq)` float32: 0 in rows past the first epoch,
            1 in the others.
        """
        batch = self.cut(self.order(rows).astype(np.int64))
        if not self.repeat:
            inside = np.asarray(rows) < len(self)
            batch["weights"] = np.repeat(inside[:, None], self.seq, axis=1).astype(np.float32)
        return batch


def _permuted(places: np.ndarray, epochs: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Returns the images of `places` (all below `size`) under the permutation of their epoch."""
    half = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))  # the number of bits of each half
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
