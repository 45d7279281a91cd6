"""Decides which steps to keep when another is saved."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Retention:
    """A preservation policy for orbax that keeps the latest steps and those of the lowest loss.

    Attributes:
        latest: how many of the latest steps to keep; `None` keeps all.
        best: how many steps of the lowest loss to keep in addition.
        loss_of: returns a committed step's loss; NaN if it has none. Such a step is never one of the best.
    """

    latest: int | None
    best: int
    loss_of: Callable[[int], float]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Returns whether to keep each checkpoint. The newest, which is being written, is always kept."""
        del context
        steps = [checkpoint.step for checkpoint in checkpoints]
        if self.latest is None:
            return [True] * len(steps)
        ordered = sorted(steps)
        kept = set(ordered[-self.latest :])
        if self.best:
            losses = [(self.loss_of(step), step) for step in ordered[:-1]]
            kept.update(step for _, step in sorted(pair for pair in losses if not math.isnan(pair[0]))[: self.best])
        return [step in kept for step in steps]
