"""Describes what a chain does as a list of events that can be printed, tested and counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence


@dataclasses.dataclass(frozen=True)
class Gather:
    """Gathers a layer's weights, starting no sooner than the current activation or gradient is available."""

    stage: int
    layer: int


@dataclasses.dataclass(frozen=True)
class Compute:
    """Runs a layer, forward or backward.

    Attributes:
        keep: whether the layer keeps its gathered weights from forward to backward.
        away: whether the activations that the layer saves are kept in the host's memory between the passes.
    """

    stage: int
    layer: int
    keep: bool
    away: bool = False


@dataclasses.dataclass(frozen=True)
class Reduce:
    """Reduces the gradients of a layer's gathered weights to those of its shards."""

    stage: int
    layer: int


@dataclasses.dataclass(frozen=True)
class Divide:
    """Sums a layer's reduced gradients over further axes, which divide the shards; see `Stage.divide`."""

    stage: int
    layer: int


@dataclasses.dataclass(frozen=True)
class Offload:
    """Copies to the host's memory the activations that a layer saved."""

    stage: int
    layer: int


@dataclasses.dataclass(frozen=True)
class Fetch:
    """Copies a layer's activations back from the host's memory.

    Outside loops, the copy starts no sooner than the current gradient is available; see `in_loop`.
    """

    stage: int
    layer: int


@dataclasses.dataclass(frozen=True)
class Barrier:
    """Makes everything in flight end before the next layer begins; see [Note: ties] in `_run.py`.

    In a loop, copies to the host are not affected; see `in_loop`.
    """


@dataclasses.dataclass(frozen=True)
class Loop:
    """Runs `body` for layers `start` to `stop` (exclusive) of a stage, in ascending order in forward and in descending
    order in backward.

    In `body`, layer numbers are relative to the layer of the iteration: 0 is that layer, 1 the one after it in the
    stage, -1 the one before it.

    Attributes:
        unroll: the number of iterations in one pass of the compiled loop.
    """

    stage: int
    start: int
    stop: int
    unroll: int
    body: tuple[Event, ...]


Event = Gather | Compute | Reduce | Divide | Offload | Fetch | Barrier | Loop


@dataclasses.dataclass(frozen=True)
class Plan:
    """The events of both passes. Converted to a string, it is the text that `describe` returns.

    Attributes:
        forward: the events of the forward pass.
        backward: the events of the backward pass.
        keep_sent: whether a layer that does not keep its gathered weights keeps what it sent in forward, to send it
            again in backward instead of casting and joining shards again.
    """

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    keep_sent: bool = False

    def __str__(self) -> str:
        return self.describe()

    def describe(self, names: Sequence[str] | None = None) -> str:
        """Returns the plan as text. Every `Barrier` ends a line. With prefetching, the events of a line may overlap.

        Args:
            names: the names of the stages; by default, their numbers.
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
