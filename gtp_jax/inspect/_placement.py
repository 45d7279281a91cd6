"""Models a step of one placement of a model on GPUs: its time, and what is exposed over which axes."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable

from .. import hlo
from ..models import LlamaConfig
from ..runner.flags import Parallelism, PlanOptions
from ._step_launches import step_launches
from ._step_shape import StepShape

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Placement:
    """A placement, and what its step is modelled to take.

    Attributes:
        parallelism: the degrees.
        shape: the step.
        line: the modelled times.
        state_bytes: the memory of a device for weights and AdamW's state.
    """

    parallelism: Parallelism
    shape: StepShape
    line: hlo.Timeline
    state_bytes: float

    @property
    def step_ms(self) -> float:
        """The time of a step."""
        return self.line.total_us / 1e3

    @property
    def compute_ms(self) -> float:
        """The time of compute."""
        return self.line.compute_us / 1e3

    @property
    def traffic_ms(self) -> dict[Axes, float]:
        """The time of collectives, by the axes that they run over."""
        found: dict[Axes, float] = collections.defaultdict(float)
        for axes, span in self._sent:
            found[axes] += (span.end_us - span.start_us) / 1e3
        return dict(found)

    @functools.cached_property
    def exposed_ms(self) -> dict[Axes, float]:
        """The part of it that nothing hides. A wait for a collective that others hold up counts for these."""
        found: dict[Axes, float] = collections.defaultdict(float)
        for axes, span in self._sent:
            begin = span.end_us - span.exposed_us
            for others, other in self._sent if begin < span.start_us else ():
                held = max(0.0, min(other.end_us, span.start_us) - max(other.start_us, begin))
                found[others] += held / 1e3
                found[axes] -= held / 1e3
            found[axes] += span.exposed_us / 1e3
        return dict(found)

    @property
    def crossing(self) -> frozenset[Axes]:
        """The axes whose ranks are on several hosts."""
        return frozenset(axes for axes in self.traffic_ms if self.ranks_per_host(axes) is not None)

    def ranks_per_host(self, axes: Axes) -> int | None:
        """Returns the smallest number of ranks of a group that share a host, or `None` if no group spans hosts."""
        network = self.line.network
        own = next(span.event.collective for sent, span in self._sent if sent == axes)
        assert own is not None
        return None if network is None else network.ranks_per_host(own)

    @property
    def memory_bytes(self) -> float:
        """The memory that a step needs on a device."""
        return self.state_bytes + self.shape.working_bytes

    def __str__(self) -> str:
        return self.of([axis for axis, size in self.shape.degrees.items() if size > 1]) or "one GPU"

    def of(self, axes: Iterable[str]) -> str:
        """Returns axes with their degrees."""
        return " x ".join(f"{axis} {self.shape.degrees[axis]}" for axis in axes)

    @functools.cached_property
    def _sent(self) -> list[tuple[Axes, hlo.Span]]:
        return [(span.event.collective.axes, span) for span in self.line.spans if span.event.collective is not None]


def placement(options: PlanOptions, parallelism: Parallelism, microbatches: int) -> Placement:
    """Models a placement."""
    shape = step_shape(options, parallelism, microbatches)
    line = hlo.timeline(step_launches(shape), shape.chip, options.network, faster=options.faster)
    return Placement(parallelism, shape, line, shape.state_bytes)


def step_shape(options: PlanOptions, parallelism: Parallelism, microbatches: int) -> StepShape:
    """Returns the step of a placement."""
    config = options.model
    assert isinstance(config, LlamaConfig)
    return StepShape(
        config=config,
        chip=options.machine.chip,
        degrees=parallelism.degrees(options.machine.devices),
        roles=parallelism.roles,
        seq=options.seq,
        batch=options.sequences,
        microbatches=microbatches,
        gpus_per_host=options.gpus_per_host,
        gradient_bytes=4 if options.grad_reduce == "float32" else 2,
    )
