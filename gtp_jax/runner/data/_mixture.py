"""Rows of several texts: concatenated, or mixed by weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._rows import Rows

# Weights are rounded to multiples of one over this. A row's number times such a multiple fits 64 bits up to row 2**39.
_PARTS = 1 << 24


class _OfTexts(Rows):
    """Rows of several texts."""

    parts: Sequence[Rows]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def kinds(self) -> dict[str, type]:
        return self.parts[0].kinds


@dataclasses.dataclass(frozen=True, eq=False)
class Joined(_OfTexts):
    """The rows of several texts, each once per epoch, in one shuffled order.

    Attributes:
        parts: the rows of each text, all with the same arrays and length.
        seq: the number of tokens per row.
        seed: the seed of the order.
        repeat: whether the rows continue after the first epoch.
    """

    parts: Sequence[Rows]
    seq: int
    seed: int = 0
    repeat: bool = True

    def cut(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        ends = np.cumsum([len(part) for part in self.parts])
        which = np.searchsorted(ends, numbers, side="right")
        firsts = ends - [len(part) for part in self.parts]
        return _scattered(which, [(part.cut, numbers - first) for part, first in zip(self.parts, firsts, strict=True)])


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture(_OfTexts):
    """Rows of several texts, mixed by weight.

    Among the first `R` rows, for any `R`, the number of rows of each text differs from its share by at most the number
    of texts. Each text has its own epochs, so a small text is repeated while a large one is read once.

    Attributes:
        parts: the rows of each text, all with the same arrays and length, each with its own order.
        weights: the weight of each text, positive; they may have any sum.
        seq: the number of tokens per row.
    """

    parts: Sequence[Rows]
    weights: Sequence[float]
    seq: int

    def cut(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        raise NotImplementedError("rows of a mixture have no place in one text")

    def rows(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        which, inner = self.sources(rows)
        return _scattered(which, [(part.rows, inner) for part in self.parts])

    def sources(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the text of each row of the run, and the row's number among the rows of its text, both `(R,)` int64.

        The first text takes row `r` if `floor((r + 1) * share) > floor(r * share)`. The other rows are renumbered and
        divided among the other texts in the same way.
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
    """Assembles rows that come from several sources.

    Args:
        which: `(R,)`, the source of each row.
        sources: for each source, a function from numbers to rows, and `(R,)` numbers, which are used for the rows of
            that source.
    """
    found: dict[str, np.ndarray] = {}
    for number, (rows_of, numbers) in enumerate(sources):
        (here,) = np.nonzero(which == number)
        if len(here):
            for name, rows in rows_of(numbers[here]).items():
                found.setdefault(name, np.empty((len(which), *rows.shape[1:]), rows.dtype))[here] = rows
    return found
