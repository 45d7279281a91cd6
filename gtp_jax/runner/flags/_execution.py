"""How a step is executed: microbatches, the chain's schedule, what is kept for backward, how gradients are summed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from ...chain import REMAT, KeepGathered, Remat, Schedule
from ...mesh import TP
from ...nn import GRAD_REDUCE, GradReduce
from ...train import REDUCE_OVER_DP, ReduceOverDp
from ._knobs import check_knobs, count_or, knob


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """How a step is executed. None of this changes what it computes, but for how `grad_reduce` rounds gradients.

    Raises:
        ValueError: if a value is out of range.
    """

    microbatches: int = knob(1, "execution", "parts that a rank's sequences are divided into", metavar="N")
    prefetch: bool = knob(True, "execution", "gather the next layer's weights under this layer's compute", kind=bool)
    unroll: int | Literal["full"] = knob(
        "full", "execution", "layers in one loop body, or 'full'", kind=count_or("full"), metavar="N"
    )
    keep_gathered: KeepGathered = knob(
        "auto",
        "execution",
        "layers, from the last, that keep gathered weights for backward, 'all', or 'auto': 1, and all where no weight "
        "travels",
        kind=count_or("all", "auto"),
        metavar="N",
    )
    grad_reduce: GradReduce = knob(
        "float32",
        "execution",
        "how weight gradients are summed over gtp: reduce-scatter in float32; in bf16 on the wire, each rank's rounded "
        "once, summed in float32; or reduce-scatter in bf16, every partial sum rounded",
        kind=str,
        choices=GRAD_REDUCE,
    )
    reduce_over_dp: ReduceOverDp = knob(
        "each",
        "execution",
        "when gradients are summed over dp, if it divides the optimizer's state: with each microbatch, or once, behind "
        "the last",
        kind=str,
        choices=REDUCE_OVER_DP,
    )
    remat: Remat = knob("matmuls", "execution", "what a layer keeps for backward", kind=str, choices=REMAT)

    def __post_init__(self) -> None:
        check_knobs(self)
        Schedule(prefetch=self.prefetch, unroll=self.unroll, keep_gathered=self.keep_gathered)

    @property
    def of_model(self) -> dict[str, Any]:
        """The fields that a model's configuration has too."""
        names = ("prefetch", "unroll", "keep_gathered", "grad_reduce", "remat")
        return {name: getattr(self, name) for name in names}

    def check_batch(self, batch: int, degrees: Mapping[str, int]) -> None:
        """Checks that every rank has as many sequences in each microbatch.

        Args:
            batch: sequences of a step.
            degrees: of the mesh's axes, by name; tp does not shard the batch.

        Raises:
            ValueError: if the ranks and microbatches do not divide the batch.
        """
        factors = {axis: size for axis, size in degrees.items() if axis != TP} | {"microbatches": self.microbatches}
        parts = math.prod(factors.values())
        if batch % parts:
            raise ValueError(
                f"`batch` is {batch}, which is not divisible by {' * '.join(factors)} = "
                f"{' * '.join(map(str, factors.values()))} = {parts}. Take {max(1, batch // parts) * parts}, for "
                "instance."
            )
