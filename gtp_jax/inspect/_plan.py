"""Plans how to divide a model among GPUs: models a step of every placement, and keeps the fastest that fit.

Nothing is compiled. The memory of the state is counted exactly for the placements that are kept.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence

from ..models import LlamaConfig
from ..runner.flags import Parallelism, PlanOptions
from ._memory_plan import MemoryPlan, limit_bytes, plan_memory
from ._placement import Placement, placement, step_shape
from ._plan_text import plan_text

_MOST = 3  # placements that are kept whatever their axes
_DEGREES = 5  # dp, gtp, cp, ep and tp

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
        smallest: the one that needs least memory, if none fits.
        memory: the options with which the state fits, in the first placement, or else in the smallest.
    """

    options: PlanOptions
    placements: tuple[Placement, ...]
    considered: int
    smallest: Placement | None
    memory: MemoryPlan

    def __str__(self) -> str:
        return plan_text(self.options, self.placements, self.considered, self.smallest, self.memory)


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
    while queue:
        found = heapq.heappop(queue)[2]
        kinds = [kind for kind in _KINDS if kind(found) and not any(map(kind, kept))]
        if len(kept) >= _MOST and not kinds:
            continue
        try:
            state = _memory(options, found).choices[0].between
        except ValueError:  # of layers, when they are built on the mesh
            continue
        found = dataclasses.replace(found, state_bytes=state.device_bytes)
        if found.memory_bytes <= limit:
            kept.append(found)
        else:
            add(found.parallelism, found.shape.microbatches)
    if kept:
        return Plan(options, tuple(kept), len(allowed), None, _memory(options, kept[0]))
    smallest, memory = _smallest(options, allowed)
    return Plan(options, (), len(allowed), smallest, memory)


def _memory(options: PlanOptions, found: Placement) -> MemoryPlan:
    return plan_memory(options.model, options.machine, found.parallelism)


def _smallest(options: PlanOptions, allowed: Sequence[Parallelism]) -> tuple[Placement, MemoryPlan]:
    """Returns the placement that needs least memory, of those that layers do not refuse, and the plan of its memory.

    Raises:
        ValueError: if layers refuse all.
    """

    def size(step: tuple[Parallelism, int]) -> float:
        shape = step_shape(options, *step)
        return shape.state_bytes + shape.working_bytes

    steps = [min(((one, count) for count in _microbatches(options, one)), key=size) for one in allowed]
    refused: list[ValueError] = []
    for step in sorted(steps, key=size):
        found = placement(options, *step)
        try:
            memory = _memory(options, found)
        except ValueError as error:
            refused.append(error)
            continue
        return dataclasses.replace(found, state_bytes=memory.choices[0].between.device_bytes), memory
    raise refused[0]


def _allowed(options: PlanOptions) -> list[Parallelism]:
    """Returns the placements that the model and the batch allow.

    Raises:
        ValueError: if there is none; the message says why one with the given degrees is none.
    """
    machine, given = options.machine, options.degrees.given
    found, parts, why = [], set(), []
    for one in options.degrees.choices(machine.devices):
        try:
            _check(options, one)
        except ValueError as error:
            why.append(error)
            continue
        if any(_microbatches(options, one)):
            found.append(one)
        else:
            parts.add(one.dp * (one.gtp or 1) * one.ep * (options.microbatches or 1))
    if found:
        return found
    if parts:
        raise ValueError(_indivisible(options, parts))
    if why:
        raise why[0]
    whole = len(given) == _DEGREES
    raise ValueError(
        f"{options.degrees} is {math.prod(given.values())}, which must {'equal' if whole else 'divide'} the "
        f"{machine.devices} devices of `target` {options.target!r}{', because all degrees are given' * whole}. Choose "
        "degrees whose product does, or leave some out."
    )


def _indivisible(options: PlanOptions, parts: Collection[int]) -> str:
    """Returns why no placement fits the batch: into how many parts they divide it."""
    least = sorted(part for part in parts if not any(part % other == 0 for other in parts if other < part))
    given, count, batch = str(options.degrees), options.microbatches, options.sequences
    return (
        f"`batch` is {batch}, which must be a multiple of dp x gtp x ep{'' if count is None else ' x microbatches'}: "
        f"of {' or '.join(map(str, least))}, on the {options.machine.devices} devices of `target` {options.target!r} "
        f"with {given or 'no degree given'}{'' if count is None else f' and microbatches {count}'}. Take "
        f"{max(1, batch // least[0]) * least[0]}, for instance{', or leave degrees out' if given else ''}."
    )


def _check(options: PlanOptions, one: Parallelism) -> None:
    """Checks that the model can be divided as this placement says.

    Raises:
        ValueError: if not.
    """
    config, given = options.model, options.degrees.given
    assert isinstance(config, LlamaConfig)
    tp, cp, ep = one.tp or 1, one.cp, one.ep
    config.check_mesh(tp=tp, seq=options.seq, cp=cp)
    for refused, reason in (
        (tp > options.gpus_per_host, f"more than the {options.gpus_per_host} GPUs of a host"),
        (config.num_kv_heads % tp, f"which does not divide the {config.num_kv_heads} key-value heads"),
    ):
        if refused and "tp" not in given:
            raise ValueError(
                f"`tp` would be {tp}, {reason}. It is taken if you give it, with --tp {tp}; or leave other degrees out."
            )
    if config.num_heads % (tp * cp):
        raise ValueError(f"`num_heads` is {config.num_heads}, which tp {tp} x cp {cp} do not divide.")
    if ep > 1 and (not config.num_experts or config.num_experts % ep):
        experts = (
            f"has {config.num_experts} experts, which it does not divide" if config.num_experts else "has no experts"
        )
        raise ValueError(f"`ep` is {ep}, but a layer {experts}. Choose 1 or a divisor.")


def _microbatches(options: PlanOptions, one: Parallelism) -> Iterator[int]:
    """Yields the numbers of microbatches that a rank's sequences allow, smallest first."""
    own, rest = divmod(options.sequences, one.dp * (one.gtp or 1) * one.ep)
    if own and not rest:
        wanted = options.microbatches
        yield from (n for n in range(1, own + 1) if own % n == 0 and wanted in (None, n))
