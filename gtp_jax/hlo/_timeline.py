"""Models the times of a scheduled program on two streams, one for compute and one for communication.

The time of a matmul is its number of operations divided by the chip's ceiling. The time of a collective is the number
of bytes that leave a device, divided by the rate of its link, for any receivers: a GPU on an NVLink switch has one rate
for everything that it sends. What leaves a host travels at the rate of a `Network`, if one is given. Each stream runs
one operation at a time, because XLA runs collectives on one stream (openxla/xla#17749), even if several are in flight
in its schedule. The compute stream waits where the schedule does. Launches, elementwise work and interference between
the streams are not modeled. So the result can rank schedules, but does not predict the time of a step.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from ._chips import Fact, fact
from ._launch_order import Event, LaunchOrder
from ._network import Network, wire_seconds

Lane = Literal["compute", "communication"]


@dataclasses.dataclass(frozen=True)
class Span:
    """The modeled time of an event.

    Attributes:
        event: the event.
        lane: the stream that it runs on.
        start_us: the modeled start, in microseconds since the start of the program.
        end_us: the modeled end, in microseconds since the start of the program.
        exposed_us: the time that the compute stream waits for it, in microseconds.
    """

    event: Event
    lane: Lane
    start_us: float
    end_us: float
    exposed_us: float = 0.0


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The modeled times of a program on a chip.

    Attributes:
        spans: one span per event, in the order of launches. An event in a loop is one span with the duration of all its
            runs.
        flop_rate: the rate assumed for matmuls and attention.
        link_rate: the rate assumed for collectives over NVLink.
        network: the links assumed between hosts; `None` if NVLink joins all GPUs.
    """

    spans: tuple[Span, ...]
    flop_rate: Fact
    link_rate: Fact
    network: Network | None = None

    @property
    def compute_us(self) -> float:
        """The time that the compute stream is busy, in microseconds."""
        return sum(s.end_us - s.start_us for s in self.spans if s.lane == "compute")

    @property
    def communication_us(self) -> float:
        """The time that the communication stream is busy, in microseconds."""
        return sum(s.end_us - s.start_us for s in self.spans if s.lane == "communication")

    @property
    def exposed_us(self) -> float:
        """The time that the compute stream waits for collectives, in microseconds."""
        return sum(s.exposed_us for s in self.spans)

    @property
    def total_us(self) -> float:
        """The time of the program, in microseconds."""
        return max((s.end_us for s in self.spans), default=0.0)


def timeline(program: LaunchOrder, chip: str, network: Network | None = None) -> Timeline:
    """Models the times of a program.

    Args:
        program: the order of its launches.
        chip: a key of `CHIPS`.
        network: the links between hosts; `None` if NVLink joins all GPUs.

    Raises:
        ValueError: if the chip is unknown.
    """
    flop_rate = fact(chip, "bf16_ceiling", "bf16_peak")
    link_rate = fact(chip, "link_ceiling", "link_peak")
    spans: dict[int, Span] = {}
    compute = link = 0.0  # the time at which each stream becomes idle, in microseconds
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
            link = begin + 1e6 * event.times * wire_seconds(event.collective, link_rate.value, network)
            spans[i] = Span(event, "communication", begin, link)
        if not starting or event.end == event.start:
            end = spans[i].end_us
            spans[i] = dataclasses.replace(spans[i], exposed_us=max(0.0, end - compute))
            compute = max(compute, end)
    return Timeline(tuple(spans[i] for i in range(len(program.events))), flop_rate, link_rate, network)
