"""In which order a chain's layers run, and which of them share one loop body."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

KeepGathered = int | Literal["all", "auto"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """How a chain is run. None of it changes a number, only when things happen and what is kept.

    Attributes:
        prefetch: gather the next layer's weights under this layer's compute, forward and backward, and
            reduce-scatter the last gradient under this layer's backward. Off: each is waited for.
        unroll: layers of a stack in one loop body; `"full"` writes every layer out, which is fastest to run.
        keep_gathered: the number of layers, counted from the chain's end, that keep their gathered weights for
            backward, or `"all"`; the other layers gather again. Where layers are written out, these keep what they
            sent, two bytes in bfloat16 for each parameter that a rank holds, instead of casting and joining shards
            again; with `0` they keep nothing. `"auto"`, the default, keeps the last layer's gathered weights, because
            its backward follows its forward at once; and all layers' where no weight of the chain travels and layers
            are written out, because gathering again would only cast and join the same shards again.
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

    def layers_kept(self, total: int, *, travels: bool = True) -> int:
        """Returns how many layers, counted from the chain's end, keep their gathered weights for backward.

        Args:
            total: the number of layers in the chain.
            travels: whether gathering any of their weights communicates or decodes anything.
        """
        if self.keep_gathered == "auto":
            return 1 if travels or self.unroll != "full" else total
        return total if self.keep_gathered == "all" else self.keep_gathered


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclasses.dataclass(frozen=True)
class Segment:
    """Layers `start` to `stop` (exclusive) of one stage.

    `loop` is 0 where they are written out, else the number of layers in the body of the loop that runs them.
    """

    stage: int
    start: int
    stop: int
    loop: int = 0


def segments(lengths: list[int], schedule: Schedule, kept: int) -> list[Segment]:
    """Cuts a chain into stretches that are written out or looped over.

    A loop's first and last layers are written out: the last so that the next stage's gather runs under it, the first
    so that backward has nothing left to fetch when it reaches it. Layers that keep their weights stand apart from
    those that do not, for a loop's body treats all its layers alike.

    Args:
        lengths: number of layers of each stage; 1 for a single module.
        schedule: says how many layers share a loop body.
        kept: the number of layers, counted from the chain's end, that keep their weights.
    """
    total = sum(lengths)
    stretches: list[Segment] = []
    before = 0
    for stage, length in enumerate(lengths):
        body = length if schedule.unroll == "full" else schedule.unroll
        kept_here = min(length, max(0, kept - (total - before - length)))
        tail = body if kept_here == length else max(body, kept_here)
        if length <= tail + 1:
            stretches.append(Segment(stage, 0, length))
        else:
            stretches += [
                Segment(stage, 0, 1),
                Segment(stage, 1, length - tail, body),
                Segment(stage, length - tail, length),
            ]
        before += length
    return stretches
