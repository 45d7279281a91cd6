"""Describes what a chain does as a list of events that can be printed, tested and counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence


@dataclasses.dataclass(frozen=True)
class Gather:
    """Starts to gather a layer's weights, but not before the current activation or gradient has arrived."""

    stage: int
    layer: int


@dataclasses.dataclass(frozen=True)
class Compute:
    """Runs a layer, forward or backward.

    Attributes:
        keep: whether the layer keeps its gathered weights from forward to backward.
        away: whether the activations that the layer saves spend the time between the passes in the host's memory.
    """

    stage: int
    layer: int
    keep: bool
    away: bool = False


@dataclasses.dataclass(frozen=True)
class Reduce:
    """Reduce-scatters the gradient of a layer's gathered weights back to its shards."""

    stage: int
    layer: int


@dataclasses.dataclass(frozen=True)
class Offload:
    """Copies the activations that a layer saved to the host's memory."""

    stage: int
    layer: int


@dataclasses.dataclass(frozen=True)
class Fetch:
    """Copies a layer's activations back from the host's memory, but not before the current gradient has arrived."""

    stage: int
    layer: int


@dataclasses.dataclass(frozen=True)
class Barrier:
    """Makes everything in flight end together with the layer that has just been computed; see [Note: ties]."""


@dataclasses.dataclass(frozen=True)
class Loop:
    """Runs `body` for layers `start` to `stop` (exclusive) of a stage, in ascending order in forward and in descending
    order in backward.

    In `body`, layers are relative to that of the iteration: 0 is the layer itself, 1 the next, -1 the previous.

    Attributes:
        unroll: the number of iterations in one pass of the compiled loop.
    """

    stage: int
    start: int
    stop: int
    unroll: int
    body: tuple[Event, ...]


Event = Gather | Compute | Reduce | Offload | Fetch | Barrier | Loop


@dataclasses.dataclass(frozen=True)
class Plan:
    """The events of both passes. Prints as the text that `describe` returns.

    Attributes:
        forward: the events of the forward pass.
        backward: the events of the backward pass.
        keep_sent: whether what a layer sent in forward is kept and sent again in backward, instead of casting and
            joining shards again.
    """

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    keep_sent: bool = False

    def __str__(self) -> str:
        return self.describe()

    def describe(self, names: Sequence[str] | None = None) -> str:
        """Returns the plan as text. Every `Barrier` ends a line; with prefetching, the events of a line may overlap.

        Args:
            names: the names of the stages; their numbers by default.
        """
        lines: list[str] = []
        for name, events in (("forward", self.forward), ("backward", self.backward)):
            lines += [name, *_lines(events, names, name, "  ", "")]
        return "\n".join(lines)


def _lines(
    events: tuple[Event, ...], names: Sequence[str] | None, direction: str, indent: str, origin: str
) -> Iterator[str]:
    group: list[str] = []

    def flush() -> Iterator[str]:
        if group:
            yield indent + " | ".join(group)
            group.clear()

    for event in events:
        if isinstance(event, Barrier):
            yield from flush()
            continue
        stage = str(event.stage) if names is None else names[event.stage]
        if isinstance(event, Loop):
            yield from flush()
            layers = f"{stage}[{event.start}:{event.stop}]"
            unrolled = f", {event.unroll} at a time" if event.unroll > 1 else ""
            yield f"{indent}for i in {layers if direction == 'forward' else f'reversed({layers})'}{unrolled}"
            yield from _lines(event.body, names, direction, indent + "  ", "i")
            continue
        layer = f"{origin}{event.layer:+d}" if origin and event.layer else origin or str(event.layer)
        kept = ", keep weights" if isinstance(event, Compute) and event.keep else ""
        group.append(f"{type(event).__name__.lower()} {stage}[{layer}]{kept}")
    yield from flush()
