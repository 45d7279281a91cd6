"""How a step is executed: its microbatches, the chain's schedule, and what a layer keeps for backward."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from .._flags import check_knobs, count_or, knob
from ..chain import REMAT, Remat, Schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """How a step is executed. None of this changes what it computes.

    Raises:
        ValueError: if a value is out of range.
    """

    microbatches: int = knob(1, "execution", "parts that a rank's sequences are divided into", metavar="N")
    prefetch: bool = knob(True, "execution", "gather the next layer's weights under this layer's compute", kind=bool)
    unroll: int | Literal["full"] = knob(
        "full", "execution", "layers in one loop body, or 'full'", kind=count_or("full"), metavar="N"
    )
    kept: int | Literal["all"] = knob(
        1,
        "execution",
        "layers, from the last, that keep gathered weights for backward, or 'all'",
        kind=count_or("all"),
        metavar="N",
    )
    remat: Remat = knob("matmuls", "execution", "what a layer keeps for backward", kind=str, choices=REMAT)

    def __post_init__(self) -> None:
        check_knobs(self)
        Schedule(prefetch=self.prefetch, unroll=self.unroll, kept=self.kept)

    @property
    def of_model(self) -> dict[str, Any]:
        """The fields that a model's configuration has too."""
        return {"prefetch": self.prefetch, "unroll": self.unroll, "kept": self.kept, "remat": self.remat}

    def check_batch(self, batch: int, *, dp: int, gtp: int) -> None:
        """Checks that every rank has as many sequences in each microbatch.

        Raises:
            ValueError: if the ranks and microbatches do not divide the batch.
        """
        parts = dp * gtp * self.microbatches
        if batch % parts:
            raise ValueError(
                f"`batch` is {batch}, which is not divisible by dp * gtp * microbatches = {dp} * {gtp} * "
                f"{self.microbatches} = {parts}. Take {max(1, batch // parts) * parts}, for instance."
            )
