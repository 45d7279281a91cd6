"""Models the times of a scheduled program on two streams, one for compute and one for communication.

A kernel of the compute stream takes its number of operations, or of bytes that it moves, divided by what the chip
reaches in this kind of work (`RATES`). A collective takes a latency per array, and the bytes that leave a device
divided by the rate of its link, for any receivers: a GPU on an NVLink switch has one rate for everything that it sends.
What leaves a host travels at the rate of a `Network`, if one is given.

Each stream runs one operation at a time, because XLA runs collectives on one stream (openxla/xla#17749), even if
several are in flight in its schedule. The compute stream waits where the schedule does. A matmul or attention that is
launched together with a collective takes all SMs first, and the collective begins after it: another stream starts a
kernel later than the same stream does. So a collective under one matmul is not hidden, and under two, one hides it.

Launches, and how much the streams slow each other down, are not modeled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from ._chips import RATES, Fact, fact
from ._launch_order import COMPUTE, Event, LaunchOrder
from ._network import Network, wire_seconds

Lane = Literal["compute", "communication"]

# The time that a stream takes to start a kernel after an event of another stream, in microseconds, at most.
_START_US = 5.0


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
        spans: one span per event, in the order of launches, elementwise work included. An event in a loop is one span
            with the duration of all its runs.
        rates: the rate assumed for each kind of work that the program contains, by the keys of `RATES`.
        link_rate: the rate assumed for collectives over NVLink.
        link_latency: the time assumed for each array of a collective beyond that of its bytes.
        network: the links assumed between hosts; `None` if NVLink joins all GPUs.
    """

    spans: tuple[Span, ...]
    rates: Mapping[str, Fact]
    link_rate: Fact
    link_latency: Fact
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


def timeline(program: LaunchOrder, chip: str, network: Network | None = None, *, faster: float = 1.0) -> Timeline:
    """Models the times of a program.

    Args:
        program: the order of its launches.
        chip: a key of `CHIPS`.
        network: the links between hosts; `None` if NVLink joins all GPUs.
        faster: how many times as fast as the chip's matmuls and attention are.

    Raises:
        ValueError: if the chip is unknown.
    """
    launched = sorted((*program.events, *program.elementwise), key=lambda event: event.start)
    rates = {rate: fact(chip, name) for rate, name in RATES.items() if any(e.rate == rate for e in launched)}
    if faster != 1:
        rates = {name: _faster(rate, faster) for name, rate in rates.items()}
    link_rate, link_latency = fact(chip, "link_ceiling"), fact(chip, "link_latency")
    spans: dict[int, Span] = {}
    compute, stream = 0.0, _Stream()  # the time at which the compute stream becomes idle, in microseconds
    points = [(e.start, 1, i) for i, e in enumerate(launched)]
    points += [(e.end, 0, i) for i, e in enumerate(launched) if e.end > e.start]
    for _, starting, i in sorted(points):
        event = launched[i]
        own = event.collective
        if own is None:
            begin, work = compute, event.flops or event.moved
            compute += 1e6 * event.times * work / rates[event.rate].value
            spans[i] = Span(event, "compute", begin, compute)
            if event.kind in COMPUTE:
                stream.compute(begin, compute)
            continue
        if starting:
            seconds = len(own.sent) * link_latency.value + wire_seconds(own, link_rate.value, network)
            stream.launch(i, compute, 1e6 * event.times * seconds)
        if not starting or event.end == event.start:
            begin, end = stream.wait(i)
            spans[i] = Span(event, "communication", begin, end, max(0.0, end - compute))
            compute = max(compute, end)
    return Timeline(tuple(spans[i] for i in range(len(launched))), rates, link_rate, link_latency, network)


def _faster(rate: Fact, times: float) -> Fact:
    return (
        rate._replace(value=rate.value * times, source=f"{times:.3g} x {rate.source}") if "FLOP" in rate.unit else rate
    )


class _Stream:
    """The communication stream. All times are in microseconds."""

    def __init__(self) -> None:
        self._idle = 0.0  # when what has begun ends
        self._waiting: dict[int, tuple[float, float, bool]] = {}  # may begin at, duration, whether a kernel held it up
        self._begun: dict[int, tuple[float, float]] = {}  # begin, end

    def launch(self, key: int, at: float, duration: float) -> None:
        """Adds a collective, which begins after those launched before it."""
        self._waiting[key] = (at, duration, False)

    def compute(self, begin: float, end: float) -> None:
        """Says that a matmul or attention runs from `begin` to `end`: the first collective that nothing but the time of
        its launch keeps from beginning waits for its end, once."""
        for key, (at, duration, held) in list(self._waiting.items()):
            if max(at, self._idle) >= end:
                return
            if not held and at >= self._idle and begin - _START_US <= at <= begin:
                self._waiting[key] = (end, duration, True)
                return
            self._begin(key)

    def wait(self, key: int) -> tuple[float, float]:
        """Returns when a collective begins and ends."""
        for earlier in list(self._waiting):
            if key in self._begun:
                break
            self._begin(earlier)
        return self._begun[key]

    def _begin(self, key: int) -> None:
        at, duration, _ = self._waiting.pop(key)
        begin = max(at, self._idle)
        self._idle = begin + duration
        self._begun[key] = (begin, self._idle)
