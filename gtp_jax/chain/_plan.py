"""The planner: turns the lengths of a chain's stages and a `Schedule` into lists of events."""

from __future__ import annotations

from collections.abc import Sequence

from ._events import Barrier, Compute, Event, Gather, Loop, Plan, Reduce
from ._schedule import Schedule, Segment, segments


def plan(lengths: Sequence[int], schedule: Schedule, *, travels: bool = True) -> Plan:
    """Returns the events of a chain.

    With prefetching, forward gathers the weights of layer k + 1 while layer k computes. Backward processes the layers
    in reverse: while layer k computes, it gathers the weights of layer k - 1 again unless they were kept, and reduces
    the gradient of layer k + 1. Without prefetching, layers wait for each collective.

    Args:
        lengths: the number of layers of each stage; 1 for a single module.
        schedule: the schedule to follow.
        travels: whether gathering any layer's weights involves communication or decoding.
    """
    total = sum(lengths)
    kept = schedule.layers_kept(total, travels=travels)
    offsets = [sum(lengths[:stage]) for stage in range(len(lengths))]
    found = segments(list(lengths), schedule, kept)
    planner = _Planner(found, offsets, total - kept, schedule.prefetch)
    keep_sent = schedule.keep_gathered != 0 and not any(segment.loop for segment in found)
    return Plan(tuple(planner.forward()), tuple(planner.backward()), keep_sent)


class _Planner:
    def __init__(self, found: list[Segment], offsets: list[int], first_kept: int, prefetch: bool):
        self.segments = found
        self.offsets = offsets
        self.first_kept = first_kept
        self.prefetch = prefetch

    def forward(self) -> list[Event]:
        first = self.segments[0]
        events: list[Event] = [Gather(first.stage, first.start)] if self.prefetch else []
        for number, segment in enumerate(self.segments):
            stage = segment.stage
            if segment.loop:
                body = self._forward(stage, 0, (stage, 1), self._keeps(stage, segment.start))
                events.append(Loop(stage, segment.start, segment.stop, segment.loop, tuple(body)))
                continue
            for layer in range(segment.start, segment.stop):
                following = self._after(number, layer)
                events += self._forward(stage, layer, following, self._keeps(stage, layer))
        return events

    def backward(self) -> list[Event]:
        events: list[Event] = []
        last = self.segments[-1]
        if self.prefetch:
            events += self._regather((last.stage, last.stop - 1))
        behind: tuple[int, int] | None = None
        for number in reversed(range(len(self.segments))):
            segment = self.segments[number]
            stage = segment.stage
            if segment.loop:
                # either all or none of a loop's layers keep their weights; the layer before the loop does the same
                keep = self._keeps(stage, segment.start)
                body = self._backward(stage, 0, None if keep else (stage, -1), (stage, 1), keep)
                events.append(Loop(stage, segment.start, segment.stop, segment.loop, tuple(body)))
                behind = stage, segment.start
                continue
            for layer in reversed(range(segment.start, segment.stop)):
                before = self._before(number, layer)
                if before is not None and self._keeps(*before):
                    before = None
                events += self._backward(stage, layer, before, behind, self._keeps(stage, layer))
                behind = stage, layer
        if self.prefetch and behind is not None:
            events.append(Reduce(*behind))
        return events

    def _forward(self, stage: int, layer: int, following: tuple[int, int] | None, keep: bool) -> list[Event]:
        compute = Compute(stage, layer, keep)
        if not self.prefetch:
            return [Gather(stage, layer), compute]
        return [*([Gather(*following)] if following else []), compute, Barrier()]

    def _backward(
        self,
        stage: int,
        layer: int,
        before: tuple[int, int] | None,
        behind: tuple[int, int] | None,
        keep: bool,
    ) -> list[Event]:
        compute = Compute(stage, layer, keep)
        if not self.prefetch:
            return [*([] if keep else [Gather(stage, layer)]), compute, Reduce(stage, layer), Barrier()]
        gather = [Gather(*before)] if before else []
        reduce = [Reduce(*behind)] if behind else []
        return [compute, *gather, *reduce, Barrier()]  # gather and reduce wait for the layer's exchange of tokens

    def _regather(self, place: tuple[int, int]) -> list[Event]:
        return [] if self._keeps(*place) else [Gather(*place)]

    def _keeps(self, stage: int, layer: int) -> bool:
        return self.offsets[stage] + layer >= self.first_kept

    def _after(self, number: int, layer: int) -> tuple[int, int] | None:
        segment = self.segments[number]
        if layer + 1 < segment.stop:
            return segment.stage, layer + 1
        if number + 1 == len(self.segments):
            return None
        return self.segments[number + 1].stage, self.segments[number + 1].start

    def _before(self, number: int, layer: int) -> tuple[int, int] | None:
        segment = self.segments[number]
        if layer > segment.start:
            return segment.stage, layer - 1
        if number == 0:
            return None
        return self.segments[number - 1].stage, self.segments[number - 1].stop - 1
