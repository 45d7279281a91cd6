"""Modelled times of a scheduled program: two streams, a compute and a communication one.

A matmul takes its operations over the chip's ceiling, a collective the bytes that leave a device over the link's
rate, whichever neighbours they go to: a GPU behind an NVLink switch has one rate for all it sends. Each stream does one
thing at a time, because XLA runs collectives on one stream (openxla/xla#17749), even if several are in flight in its
schedule; the compute stream waits where the schedule says so. Launches, elementwise work, what the streams take from
one another and slower links between hosts are left out, so the result ranks schedules and predicts no step time.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from ._chips import Fact, fact
from ._launch_order import Event, LaunchOrder

Lane = Literal["compute", "communication"]


@dataclasses.dataclass(frozen=True)
class Span:
    """When an event runs.

    Attributes:
        event: the event.
        lane: the stream that it runs on.
        start_us: modelled start, in microseconds since the start of the program.
        end_us: modelled end.
        exposed_us: how much of its end the compute stream spends waiting for it.
    """

    event: Event
    lane: Lane
    start_us: float
    end_us: float
    exposed_us: float = 0.0


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Modelled times of a program on a chip.

    Attributes:
        spans: one an event, in the order of launches. What a loop repeats is one span of the whole duration.
        flop_rate: the rate assumed for matmuls and attention.
        link_rate: the rate assumed for collectives.
    """

    spans: tuple[Span, ...]
    flop_rate: Fact
    link_rate: Fact

    @property
    def compute_us(self) -> float:
        """Time that the compute stream computes."""
        return sum(s.end_us - s.start_us for s in self.spans if s.lane == "compute")

    @property
    def communication_us(self) -> float:
        """Time that the communication stream communicates."""
        return sum(s.end_us - s.start_us for s in self.spans if s.lane == "communication")

    @property
    def exposed_us(self) -> float:
        """Time that the compute stream waits."""
        return sum(s.exposed_us for s in self.spans)

    @property
    def total_us(self) -> float:
        """Time of the program."""
        return max((s.end_us for s in self.spans), default=0.0)


def timeline(program: LaunchOrder, chip: str) -> Timeline:
    """Models the times of a program.

    Args:
        program: the order of its launches.
        chip: a key of `CHIPS`.

    Raises:
        ValueError: if the chip is unknown.
    """
    flop_rate = fact(chip, "bf16_ceiling", "bf16_peak")
    link_rate = fact(chip, "link_ceiling", "link_peak")
    spans: dict[int, Span] = {}
    compute = link = 0.0  # until when each stream is busy, in microseconds
    points = [(e.start, 1, i) for i, e in enumerate(program.events)]
    points += [(e.end, 0, i) for i, e in enumerate(program.events) if e.end > e.start]
    for _, starting, i in sorted(points):
        event = program.events[i]
        if event.collective is None:
            begin, compute = compute, compute + 1e6 * event.times * event.flops / flop_rate.value
            spans[i] = Span(event, "compute", begin, compute)
            continue
        if starting:
            begin = max(compute, link)
            link = begin + 1e6 * event.times * event.collective.wire_bytes / link_rate.value
            spans[i] = Span(event, "communication", begin, link)
        if not starting or event.end == event.start:
            end = spans[i].end_us
            spans[i] = dataclasses.replace(spans[i], exposed_us=max(0.0, end - compute))
            compute = max(compute, end)
    return Timeline(tuple(spans[i] for i in range(len(program.events))), flop_rate, link_rate)
