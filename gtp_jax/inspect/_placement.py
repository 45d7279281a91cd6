"""Models a step of one placement of a model on GPUs: its time, and what is exposed over which axes."""

from __future__ import annotations

import collections
import dataclasses
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
        return self._by_axes((s, s.end_us - s.start_us) for s in self.line.spans)

    @property
    def exposed_ms(self) -> dict[Axes, float]:
        """The part of it that nothing hides."""
        return self._by_axes((s, s.exposed_us) for s in self.line.spans)

    @property
    def crossing(self) -> frozenset[Axes]:
        """The axes whose ranks are on several hosts."""
        network, sent = self.line.network, [s.event.collective for s in self.line.spans]
        return frozenset(c.axes for c in sent if c and network and network.ranks_per_host(c) is not None)

    @property
    def memory_bytes(self) -> float:
        """The memory that a step needs on a device."""
        return self.state_bytes + self.shape.working_bytes

    def __str__(self) -> str:
        return self.of([axis for axis, size in self.shape.degrees.items() if size > 1]) or "one GPU"

    def of(self, axes: Iterable[str]) -> str:
        """Returns axes with their degrees."""
        return " x ".join(f"{axis} {self.shape.degrees[axis]}" for axis in axes)

    def _by_axes(self, times: Iterable[tuple[hlo.Span, float]]) -> dict[Axes, float]:
        found: collections.Counter[Axes] = collections.Counter()
        for span, us in times:
            if span.event.collective is not None:
                found[span.event.collective.axes] += us / 1e3
        return dict(found)


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
