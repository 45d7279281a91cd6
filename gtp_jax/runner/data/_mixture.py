"""Rows of several texts: one behind the other, or mixed by weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._rows import Rows

# Weights are whole numbers of this many parts; a row's number times one fits 64 bits up to row 2**39.
_PARTS = 1 << 24


@dataclasses.dataclass(frozen=True, eq=False)
class Joined(Rows):
    """The rows of texts, each once an epoch, in one order.

    Attributes:
        parts: rows of each text, of one kind and length.
        seq: tokens of a row.
        seed: of the order.
        repeat: whether epochs follow each other.
    """

    parts: Sequence[Rows]
    seq: int
    seed: int = 0
    repeat: bool = True

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def kinds(self) -> dict[str, type]:
        return self.parts[0].kinds

    def cut(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        ends = np.cumsum([len(part) for part in self.parts])
        which = np.searchsorted(ends, numbers, side="right")
        firsts = ends - [len(part) for part in self.parts]
        return _scattered(which, [(part.cut, numbers - first) for part, first in zip(self.parts, firsts, strict=True)])


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture(Rows):
    """Rows of several texts by weight: of any first `R` rows, each text has its share to within one row for each text.

    Each text has epochs of its own, so that a small one is repeated while a large one is read once.

    Attributes:
        parts: rows of each text, of one kind and length, each with its own order.
        weights: of each, positive; their sum is any.
        seq: tokens of a row.
    """

    parts: Sequence[Rows]
    weights: Sequence[float]
    seq: int

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def kinds(self) -> dict[str, type]:
        return self.parts[0].kinds

    def cut(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        raise NotImplementedError("rows of a mixture have no place in one text")

    def rows(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        which, inner = self.sources(rows)
        return _scattered(which, [(part.rows, inner) for part in self.parts])

    def sources(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the text of each row of the run, and the row's number among those of its text, `(R,)` int64 both.

        The first text takes row `r` where `floor(r * share)` grows behind it; the rows that it leaves are numbered
        again and divided among the others in the same way.
        """
        left = np.asarray(rows, np.int64)
        which, inner = np.full(left.shape, -1), np.zeros(left.shape, np.int64)
        parts = [max(1, round(weight / sum(self.weights) * _PARTS)) for weight in self.weights]
        for text, share in enumerate(parts):
            whole = sum(parts[text:])
            before, after = left * share // whole, (left + 1) * share // whole
            takes = (which < 0) & (after > before)
            which, inner = np.where(takes, text, which), np.where(takes, before, inner)
            left = left - before
        return which, inner


def _scattered(which: np.ndarray, sources: Sequence[tuple[Any, np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns rows of several sources in their places.

    Args:
        which: `(R,)` source of each row.
        sources: function from numbers to rows, and the number of each row in it, where it is the row's source.
    """
    found: dict[str, np.ndarray] = {}
    for number, (rows_of, numbers) in enumerate(sources):
        (here,) = np.nonzero(which == number)
        if len(here):
            for name, rows in rows_of(numbers[here]).items():
                found.setdefault(name, np.empty((len(which), *rows.shape[1:]), rows.dtype))[here] = rows
    return found
