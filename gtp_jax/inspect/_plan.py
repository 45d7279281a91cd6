"""Plans how to divide a model among GPUs: models a step of every placement, and keeps the fastest that fit.

Nothing is compiled. The memory of the state is counted exactly for the placements that are kept.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterator

from ..models import LlamaConfig
from ..runner.flags import Parallelism, PlanOptions
from ._memory_plan import MemoryPlan, limit_bytes, plan_memory
from ._placement import Placement, placement, step_shape
from ._plan_text import plan_text

_MOST = 3  # placements that are kept whatever their axes

# The best placement of each of these kinds is kept too, because it shows what the others would cost.
_KINDS: tuple[Callable[[Placement], bool], ...] = (
    lambda found: found.shape.dense_ranks == found.shape.ranks(tuple(found.shape.degrees)),
    lambda found: found.shape.degrees["dp"] > 1,
    lambda found: found.shape.tp > 1,
    lambda found: found.shape.ep > 1,
    lambda found: found.shape.cp > 1,
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Placements of a model on GPUs. Prints as tables, with the reasons.

    Attributes:
        options: the options of the plan.
        placements: those that fit, fastest first; empty if none fits.
        considered: the number of placements that the model and the batch allow.
        memory: the options with which the state fits, in the first placement, or else in the smallest.
    """

    options: PlanOptions
    placements: tuple[Placement, ...]
    considered: int
    memory: MemoryPlan

    def __str__(self) -> str:
        return plan_text(self.options, self.placements, self.considered, self.memory)


def plan(options: PlanOptions) -> Plan:
    """Plans how to divide a model among GPUs, from shapes alone.

    Raises:
        ValueError: if no placement has the given degrees, and fits the model, the batch and the number of GPUs.
    """
    allowed = _allowed(options)
    limit = limit_bytes(options.machine)
    queue: list[tuple[float, int, Placement]] = []
    order = itertools.count()

    def add(parallelism: Parallelism, more_than: int = 0) -> None:
        for count in _microbatches(options, parallelism):
            shape = step_shape(options, parallelism, count)
            if count > more_than and shape.state_bytes + shape.working_bytes <= limit:
                found = placement(options, parallelism, count)
                heapq.heappush(queue, (found.step_ms, next(order), found))
                return

    for parallelism in allowed:
        add(parallelism)
    kept: list[Placement] = []
    refused: list[ValueError] = []  # by layers, when they are built on the mesh
    while queue:
        found = heapq.heappop(queue)[2]
        kinds = [kind for kind in _KINDS if kind(found) and not any(map(kind, kept))]
        if len(kept) >= _MOST and not kinds:
            continue
        try:
            state = plan_memory(options.model, options.machine, found.parallelism).choices[0].between
        except ValueError as error:
            refused.append(error)
            continue
        found = dataclasses.replace(found, state_bytes=state.device_bytes)
        if found.memory_bytes <= limit:
            kept.append(found)
        else:
            add(found.parallelism, found.shape.microbatches)
    if refused and not kept:
        raise refused[0]
    best = kept[0].parallelism if kept else min(allowed, key=lambda one: step_shape(options, one, 1).state_bytes)
    return Plan(options, tuple(kept), len(allowed), plan_memory(options.model, options.machine, best))


def _allowed(options: PlanOptions) -> list[Parallelism]:
    """Returns the placements that the model and the batch allow.

    Raises:
        ValueError: if there is none; the message says why one with the given degrees is none.
    """
    machine, given = options.machine, options.degrees.given
    found, why = [], []
    for one in options.degrees.choices(machine.devices):
        try:
            _check(options, one)
            found.append(one)
        except ValueError as error:
            why.append(str(error))
    if found:
        return found
    if why:
        raise ValueError(why[0])
    degrees = " x ".join(f"{axis} {degree}" for axis, degree in given.items())
    raise ValueError(
        f"{degrees} does not divide the {machine.devices} devices of `target` {options.target!r}. Choose degrees whose "
        "product does, or leave some out."
    )


def _check(options: PlanOptions, one: Parallelism) -> None:
    """Checks that the model and the batch can be divided as this placement says.

    Raises:
        ValueError: if not.
    """
    config, given = options.model, options.degrees.given
    assert isinstance(config, LlamaConfig)
    tp, cp, ep = one.tp or 1, one.cp, one.ep
    config.check_mesh(tp=tp, seq=options.seq, cp=cp)
    if "tp" not in given and (tp > options.gpus_per_host or config.num_kv_heads % tp):
        raise ValueError(f"`tp` {tp} is more than a host has, or divides the key-value heads unevenly. Choose `tp`.")
    if config.num_heads % (tp * cp):
        raise ValueError(f"`num_heads` is {config.num_heads}, which tp {tp} x cp {cp} do not divide.")
    if ep > 1 and (not config.num_experts or config.num_experts % ep):
        experts = (
            f"has {config.num_experts} experts, which it does not divide" if config.num_experts else "has no experts"
        )
        raise ValueError(f"`ep` is {ep}, but a layer {experts}. Choose 1 or a divisor.")
    if not list(_microbatches(options, one)):
        parts = one.dp * (one.gtp or 1) * ep * (options.microbatches or 1)
        words = f"dp {one.dp} x gtp {one.gtp} x ep {ep}"
        words += "" if options.microbatches is None else f" x microbatches {options.microbatches}"
        raise ValueError(
            f"`batch` is {options.sequences}, which {words} = {parts} does not divide. Take {parts}, for instance, or "
            "leave degrees out."
        )


def _microbatches(options: PlanOptions, one: Parallelism) -> Iterator[int]:
    """Yields the numbers of microbatches that a rank's sequences allow, smallest first."""
    own, rest = divmod(options.sequences, one.dp * (one.gtp or 1) * one.ep)
    if own and not rest:
        wanted = options.microbatches
        yield from (n for n in range(1, own + 1) if own % n == 0 and wanted in (None, n))
