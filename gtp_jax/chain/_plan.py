"""Plans a chain: turns the lengths of its stages and a `Schedule` into lists of events."""

from __future__ import annotations

from collections.abc import Sequence

from ._events import Barrier, Compute, Divide, Event, Fetch, Gather, Loop, Offload, Plan, Reduce
from ._schedule import Schedule, Segment, segments


def plan(
    lengths: Sequence[int],
    schedule: Schedule,
    *,
    only_casts: bool = False,
    offload: Sequence[bool] | None = None,
    divides: Sequence[bool] | None = None,
) -> Plan:
    """Returns the events of a chain.

    With prefetching, forward gathers the weights of layer k + 1 while layer k computes. Backward processes the layers
    in reverse: while layer k computes, it gathers the weights of layer k - 1 again unless they were kept, and reduces
    the gradient of layer k + 1. Without prefetching, each layer waits for its own collectives.

    If further axes divide the shards, reduced gradients are also summed over these. In a loop of single layers, an
    iteration does so for the layer whose gradient the iteration before it has reduced. If both sums were of the same
    layer, the second could not begin before the first has ended, and XLA finds no compute to run the first under. Where
    it can order the work of several layers, it does.

    If a stage offloads and there is prefetching, the activations that layer k saves are copied to the host while layer
    k + 1 computes, and back while backward processes layer k + 1. Without prefetching, they are copied right after
    layer k computes, and back right before its backward. The chain's last layer keeps its activations on the device,
    because its backward directly follows.

    Args:
        lengths: the number of layers of each stage; 1 for a single module.
        schedule: the schedule to follow.
        only_casts: whether gathering only casts and joins shards, and none of them is frozen.
        offload: for each stage, whether the activations that its layers save are moved to the host between the passes.
            By default, nothing is moved.
        divides: for each stage, whether it has a `Stage.divide`. By default, none has.
    """
    total = sum(lengths)
    kept = schedule.layers_kept(total, only_casts=only_casts)
    offsets = [sum(lengths[:stage]) for stage in range(len(lengths))]
    no_stage = [False] * len(lengths)
    found = segments(list(lengths), schedule, kept, divides or no_stage)
    planner = _Planner(found, offsets, total - kept, schedule.prefetch, offload or no_stage, divides or no_stage)
    keep_sent = schedule.keep_gathered != 0 and not any(segment.loop for segment in found)
    return Plan(tuple(planner.forward()), tuple(planner.backward()), keep_sent)


class _Planner:
    def __init__(
        self,
        found: list[Segment],
        offsets: list[int],
        first_kept: int,
        prefetch: bool,
        offload: Sequence[bool],
        divides: Sequence[bool],
    ):
        self.segments = found
        self.offsets = offsets
        self.first_kept = first_kept
        self.prefetch = prefetch
        self.offload = offload
        self.divides = divides
        self.last = found[-1].stage, found[-1].stop - 1

    def forward(self) -> list[Event]:
        first = self.segments[0]
        events: list[Event] = [Gather(first.stage, first.start)] if self.prefetch else []
        for number, segment in enumerate(self.segments):
            stage = segment.stage
            if segment.loop:
                body = self._forward(stage, 0, (stage, 1), (stage, -1), self._keeps(stage, segment.start))
                events.append(Loop(stage, segment.start, segment.stop, segment.loop, tuple(body)))
                continue
            for layer in range(segment.start, segment.stop):
                following, before = self._after(number, layer), self._before(number, layer)
                events += self._forward(stage, layer, following, before, self._keeps(stage, layer))
        return events

    def backward(self) -> list[Event]:
        events: list[Event] = []
        last = self.segments[-1]
        if self.prefetch:
            events += self._regather((last.stage, last.stop - 1))
        behind: tuple[int, int] | None = None  # its gradient waits for `Reduce`
        reduced: tuple[int, int] | None = None  # its gradient waits for the loop that divides it
        for number in reversed(range(len(self.segments))):
            segment = self.segments[number]
            stage = segment.stage
            if segment.loop:
                # all layers of a loop, and the layer before it, make the same choice of whether to keep their weights
                keep = self._keeps(stage, segment.start)
                late = segment.divides_late
                sums = [*self._divide((stage, 2) if late else None), Reduce(stage, 1)]
                sums += self._divide(None if late else (stage, 1))
                body = self._backward(stage, 0, (stage, -1), sums, keep, keep)
                events.append(Loop(stage, segment.start, segment.stop, segment.loop, tuple(body)))
                behind, reduced = (stage, segment.start), (stage, segment.start + 1) if late else None
                continue
            for layer in reversed(range(segment.start, segment.stop)):
                before = self._before(number, layer)
                before_keeps = before is None or self._keeps(*before)
                late = layer == segment.start and number > 0 and self.segments[number - 1].divides_late
                sums = [*self._divide(reduced), *self._reduce(behind), *self._divide(None if late else behind)]
                events += self._backward(stage, layer, before, sums, self._keeps(stage, layer), before_keeps)
                behind, reduced = (stage, layer), behind if late else None
        if self.prefetch and behind is not None:
            events += [*self._divide(reduced), *self._reduce(behind), *self._divide(behind)]
        return events

    def _forward(
        self,
        stage: int,
        layer: int,
        following: tuple[int, int] | None,
        before: tuple[int, int] | None,
        keep: bool,
    ) -> list[Event]:
        compute = Compute(stage, layer, keep, self._away(stage, layer))
        if not self.prefetch:
            return [Gather(stage, layer), compute, *([Offload(stage, layer), Barrier()] if compute.away else [])]
        offload = [Offload(*before)] if before and self._away(*before) else []
        return [*([Gather(*following)] if following else []), compute, *offload, Barrier()]

    def _backward(
        self,
        stage: int,
        layer: int,
        before: tuple[int, int] | None,
        sums: list[Event],
        keep: bool,
        before_keeps: bool,
    ) -> list[Event]:
        compute = Compute(stage, layer, keep, self._away(stage, layer))
        if not self.prefetch:
            fetch = [Fetch(stage, layer)] if compute.away else []
            sums = [*self._reduce((stage, layer)), *self._divide((stage, layer))]
            return [*fetch, *([] if keep else [Gather(stage, layer)]), compute, *sums, Barrier()]
        fetch = [Fetch(*before)] if before and self._away(*before) else []
        gather = [Gather(*before)] if before and not before_keeps else []
        return [
            *fetch,
            compute,
            *gather,
            *sums,
            Barrier(),
        ]  # after compute, because collectives wait for the layer's exchange of tokens

    def _regather(self, place: tuple[int, int]) -> list[Event]:
        return [] if self._keeps(*place) else [Gather(*place)]

    def _reduce(self, place: tuple[int, int] | None) -> list[Event]:
        return [Reduce(*place)] if place else []

    def _divide(self, place: tuple[int, int] | None) -> list[Event]:
        return [Divide(*place)] if place and self.divides[place[0]] else []

    def _away(self, stage: int, layer: int) -> bool:
        return self.offload[stage] and (stage, layer) != self.last

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
