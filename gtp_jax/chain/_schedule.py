"""Defines what overlaps in a chain, which layers share a loop body, and which keep their gathered weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from .._words import KeepGathered


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """How a chain is run. It affects when things happen and what is kept; results differ by rounding at most.

    Attributes:
        prefetch: whether to overlap communication with compute: gather the next layer's weights while a layer computes,
            in forward and backward, and reduce-scatter the previous gradient while a layer's backward computes.
            Otherwise, each layer waits for its own collectives.
        unroll: the number of a stack's layers in one loop body; `"full"` unrolls all layers, which runs fastest.
        keep_gathered: the number of layers, counted from the end of the chain, that keep their gathered weights for
            backward, or `"all"`; the other layers gather again. If no layer of the chain runs in a loop, the other
            layers keep what they cast and joined for sending, so that they do not have to cast and join shards again.
            In bfloat16, this takes up to two bytes for each parameter that a rank holds. With `0`, they keep nothing.
            `"auto"`, the default, keeps the last layer's gathered weights, because its backward directly follows its
            forward. If no weight of the chain is communicated, decoded or frozen and `unroll` is `"full"`, it keeps
            those of all layers, because gathering again would only cast and join the same shards again. With frozen
            weights, it keeps one layer's, because those of all layers would be a second copy of most of the model.
    """

    prefetch: bool = True
    unroll: int | Literal["full"] = "full"
    keep_gathered: KeepGathered = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.prefetch, bool):
            raise ValueError(f"`prefetch` is {self.prefetch!r}; it must be True or False.")
        if self.unroll != "full" and not _is_count(self.unroll, 1):
            raise ValueError(f"`unroll` is {self.unroll!r}; it must be a number of layers, at least 1, or 'full'.")
        if self.keep_gathered not in ("all", "auto") and not _is_count(self.keep_gathered, 0):
            raise ValueError(
                f"`keep_gathered` is {self.keep_gathered!r}; it must be a number of layers, at least 0, or 'all' or "
                "'auto'."
            )

    def layers_kept(self, total: int, *, only_casts: bool = False) -> int:
        """Returns how many layers, counted from the end of the chain, keep their gathered weights for backward.

        This may exceed `total`; if so, all layers keep them.

        Args:
            total: the number of layers in the chain.
            only_casts: whether gathering only casts and joins shards, and none of them is frozen.
        """
        if self.keep_gathered == "auto":
            return total if only_casts and self.unroll == "full" else 1
        return total if self.keep_gathered == "all" else self.keep_gathered


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclasses.dataclass(frozen=True)
class Segment:
    """Layers `start` to `stop` (exclusive) of one stage.

    Attributes:
        stage: the number of the stage.
        start: the first layer.
        stop: the layer after the last.
        loop: the number of layers in the body of the loop that runs them; 0 if they are unrolled.
        divides_late: whether an iteration of backward divides the gradient that the one before it has reduced; see
            `plan`.
    """

    stage: int
    start: int
    stop: int
    loop: int = 0
    divides_late: bool = False


def segments(lengths: list[int], schedule: Schedule, kept: int, divides: Sequence[bool]) -> list[Segment]:
    """Divides a chain into segments whose layers are either unrolled or run in a loop.

    A stage with a loop begins with one unrolled layer, and ends with at least as many unrolled layers as a loop body
    has. They are needed because, with prefetching, each iteration of a loop gathers the weights of the next layer of
    its own stage (in backward, of the previous one). The stage's last layer gathers those of the next stage instead; in
    backward, its first layer gathers those of the previous stage. If it divides gradients late, each iteration of
    backward continues what the two before it have begun, so at least two layers come after the loop in forward. A loop
    never contains both layers that keep their weights and layers that do not, because its body treats all its layers in
    the same way.

    Args:
        lengths: the number of layers of each stage; 1 for a single module.
        schedule: the schedule, which determines how many layers share a loop body.
        kept: the number of layers, counted from the end of the chain, that keep their weights.
        divides: for each stage, whether it has a `Stage.divide`.
    """
    total = sum(lengths)
    stretches: list[Segment] = []
    before = 0
    for stage, length in enumerate(lengths):
        body = length if schedule.unroll == "full" else schedule.unroll
        kept_here = min(length, max(0, kept - (total - before - length)))
        late = divides[stage] and body == 1
        tail = max(body, 0 if kept_here == length else kept_here, 2 if late else 1)
        if length <= tail + 1:
            stretches.append(Segment(stage, 0, length))
        else:
            stretches += [
                Segment(stage, 0, 1),
                Segment(stage, 1, length - tail, body, late),
                Segment(stage, length - tail, length),
            ]
        before += length
    return stretches
