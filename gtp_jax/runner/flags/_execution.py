"""How a step is executed: microbatches, the chain's schedule, rematerialization, and how gradients are summed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from ..._words import (
    CP,
    GRAD_REDUCE,
    OFFLOADED,
    ON_DEVICES,
    REDUCE_OVER_DP,
    REMAT,
    SEQUENCE_EXCHANGES,
    TP,
    GradReduce,
    KeepGathered,
    Offloaded,
    ReduceOverDp,
    Remat,
    SequenceExchange,
)
from ._knobs import check_knobs, count_or, knob


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """How a step is executed. No field changes what it computes, except how `grad_reduce` rounds gradients.

    Raises:
        ValueError: if a value is out of range.
    """

    microbatches: int = knob(1, "execution", "number of parts to divide a rank's sequences into", metavar="N")
    prefetch: bool = knob(True, "execution", "gather the next layer's weights during this layer's compute", kind=bool)
    unroll: int | Literal["full"] = knob(
        "full", "execution", "number of layers per loop body, or 'full'", kind=count_or("full"), metavar="N"
    )
    keep_gathered: KeepGathered = knob(
        "auto",
        "execution",
        "number of last layers that keep gathered weights for backward, 'all', or 'auto': 1, or all if no weight is "
        "communicated, decoded or frozen",
        kind=count_or("all", "auto"),
        metavar="N",
    )
    grad_reduce: GradReduce = knob(
        "float32",
        "execution",
        "how weight gradients are summed over gtp: reduce-scatter in float32; sent in bf16, so that each rank's "
        "gradient is rounded once, and summed in float32; or reduce-scatter in bf16, which rounds every partial sum",
        kind=str,
        choices=GRAD_REDUCE,
    )
    reduce_over_dp: ReduceOverDp = knob(
        "each",
        "execution",
        "when gradients are summed over dp, if dp shards the optimizer state: with each microbatch, or once, after the "
        "last",
        kind=str,
        choices=REDUCE_OVER_DP,
    )
    remat: Remat = knob(
        "matmuls",
        "execution",
        "what a layer keeps for backward; with offload, in the host's memory",
        kind=str,
        choices=REMAT,
    )
    offload: Literal["none", "optimizer", "masters"] = knob(
        ON_DEVICES,
        "execution",
        "what of the training state stays in the host's memory: the optimizer's moments, or these and the parameters",
        kind=str,
        choices=(ON_DEVICES, *OFFLOADED),
    )
    sequence_exchange: SequenceExchange | None = knob(
        None,
        "execution",
        "what ranks of cp exchange for attention: heads for whole sequences, or the keys and values of all heads; by "
        "default heads, if cp divides those of a rank",
        kind=str,
        choices=SEQUENCE_EXCHANGES,
    )
    loss_chunk: int | None = knob(
        None,
        "execution",
        "fewest tokens whose logits are computed at once, such as 4096, with their gradients; 0 for the logits of all "
        "tokens of a rank's microbatch (default: 0; `train` takes 4096 if these would take much memory)",
        least=0,
        metavar="N",
    )

    def __post_init__(self) -> None:
        check_knobs(self)
        if (self.unroll, self.keep_gathered) != ("full", "auto"):
            from ...chain import Schedule

            Schedule(unroll=self.unroll, keep_gathered=self.keep_gathered)

    @property
    def of_model(self) -> dict[str, Any]:
        """The fields that a model's configuration also has."""
        names = ("prefetch", "unroll", "keep_gathered", "grad_reduce", "remat", "sequence_exchange")
        return {**{name: getattr(self, name) for name in names}, "loss_chunk": self.loss_chunk or 0}

    @property
    def offloaded(self) -> Offloaded | None:
        """The part of the state in the host's memory, as `TrainState.create` takes it."""
        return None if self.offload == ON_DEVICES else self.offload

    def check_batch(self, batch: int, degrees: Mapping[str, int]) -> None:
        """Checks that every rank has the same number of sequences in each microbatch.

        Args:
            batch: the number of sequences per step.
            degrees: the degrees of the mesh axes, by name; cp and tp do not shard the batch.

        Raises:
            ValueError: if the batch is not divisible by the number of ranks times microbatches.
        """
        ranks = {axis: size for axis, size in degrees.items() if axis not in (CP, TP)}
        factors = {**ranks, "microbatches": self.microbatches}
        parts = math.prod(factors.values())
        if batch % parts:
            raise ValueError(
                f"`batch` is {batch}, which is not divisible by {' * '.join(factors)} = "
                f"{' * '.join(map(str, factors.values()))} = {parts}. Take {max(1, batch // parts) * parts}, for "
                "instance."
            )
