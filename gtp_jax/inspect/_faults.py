"""Computes what a plan after failures costs: owners, bytes, memory, throughput. Needs only shapes, and no devices."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from ..hlo import quantity
from ..layout import even_shares
from ..mesh import AXES, DP, TP, Roles, use_roles, with_paths
from ..models import build, preset_of
from ..nn import ModelDef, Split
from ..nonuniform import (
    FaultPlan,
    LeafSpecs,
    Moves,
    Replica,
    Transferred,
    box_of,
    coded_leaves,
    elements,
    lay_out,
    leaf_specs,
    plan_fold,
    plan_unfold,
    replica_dtypes_of,
    sent_back,
    transferred,
    with_best_core,
    without_replicas,
)
from ..recipes import BF16
from ..runner.flags import FaultOptions
from ..train import state_specs

_GB = 1e9


@dataclasses.dataclass(frozen=True)
class Use:
    """The bytes of memory that one device needs.

    Attributes:
        masters: the parameters and the optimizer state that the device stores; 0 outside the core.
        weights: the parameters in the replica's layout, in the dtypes in which they are sent, without those that the
            core already stores in this form.
        gradients: the gradients in the replica's layout.
        transfer: the send and receive buffers, and on the core the larger of two: gradients in the core's layout, or
            parameters gathered over replicas.
        activations: other memory that the device's sequences need, scaled from that of the healthy run.
    """

    masters: int
    weights: int
    gradients: int
    transfer: int
    activations: int

    @property
    def total(self) -> int:
        """The bytes at the peak, which is assumed to be the sum."""
        return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class FaultReport:
    """The cost of a plan.

    Attributes:
        plan: the plan.
        unfold: for each replica, the moves that bring it its weights.
        fold: for each replica, the moves that bring its gradients to the core.
        memory: for each replica, the memory that each of its devices needs, row by row.
        even_masters: the bytes of parameters and optimizer state that each device of the core would store if all
            devices that share them stored equal parts of the logical arrays.
        owners: for each weight that tp divides, the number of units that each rank owns, by tp degree.
        transferred: the bytes that the busiest device transfers in each part of a step.
    """

    plan: FaultPlan
    unfold: tuple[Moves, ...]
    fold: tuple[Moves, ...]
    memory: tuple[tuple[Use, ...], ...]
    even_masters: float
    owners: dict[str, dict[int, tuple[int, ...]]]
    transferred: Transferred


def inspect_faults(options: FaultOptions) -> FaultReport:
    """Plans a run after failures, and computes the cost of the plan from shapes alone.

    Raises:
        ValueError: if the plan cannot work, or a device needs more memory than `options.memory` allows.
    """
    plan = options.plan()
    config = dataclasses.replace(preset_of(options.preset), grad_reduce=options.grad_reduce)
    with use_roles(Roles() if options.shard_optimizer else Roles(optimizer=())), even_shares():
        if options.faults.core_tp is None:
            plan = with_best_core(lambda rngs: build(config, rngs=rngs), plan)
        core, params, *_ = _laid_out(config, len(plan.replicas), plan.gtp, plan.core_tp)
        of_degree = {tp: _laid_out(config, 1, plan.gtp, tp).model_def for tp in {r.tp for r in plan.replicas}}
        state, even = _state_bytes(core, params, plan)
        sizes = dict(zip(AXES, (len(plan.replicas), plan.gtp, plan.core_tp), strict=True))
        with jax.sharding.use_abstract_mesh(_abstract(sizes)):
            wires = replica_dtypes_of(core, params, BF16(grad_wire=options.grad_wire))
    defs = [of_degree[replica.tp] for replica in plan.replicas]
    coded = coded_leaves(wires.coded, core, params, plan, defs)
    unfold, fold, memory = [], [], []
    for replica in plan.replicas:
        model_def = of_degree[replica.tp]
        weights, gradients = (leaf_specs(core, params, model_def, dtypes) for dtypes in wires[:2])
        gradients = sent_back(gradients, coded)
        unfold.append(plan_unfold(replica, weights))
        fold.append(plan_fold(replica, gradients))
        share = Fraction(replica.batch, replica.tp) / Fraction(plan.batch, plan.dp * plan.tp)
        stored = leaf_specs(core, params, model_def)
        # gradients of several microbatches are accumulated in the dtype of the parameters
        leaves = stored, weights, stored if plan.microbatches > 1 else gradients
        transfers = unfold[-1], fold[-1]
        activations = int(options.activations * _GB * share)
        memory.append(_memory(replica, leaves, transfers, sizes, state=state, activations=activations))
    of_core = [leaf_specs(core, params, core, dtypes) for dtypes in (wires.weights, wires.gradients)]
    times = transferred(of_core[0], sent_back(of_core[1], coded), unfold, fold, sizes)
    report = FaultReport(plan, tuple(unfold), tuple(fold), tuple(memory), even, _owners(of_degree), times)
    _check_memory(report, options)
    return report


def _laid_out(config: Any, dp: int, gtp: int, tp: int) -> Split:
    mesh = _abstract(dict(zip(AXES, (dp, gtp, tp), strict=True)))
    return lay_out(lambda rngs: build(config, rngs=rngs), mesh)


def _abstract(sizes: dict[Any, int]) -> AbstractMesh:
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def _state_bytes(core: ModelDef, params: Any, plan: FaultPlan) -> tuple[int, float]:
    """Returns the bytes of parameters and of AdamW's state that each device of the core stores, and would store if all
    devices that share them stored equal parts of the logical arrays."""
    optimizer = optax.adamw(1e-3)
    specs = state_specs(core, optimizer, params)
    arrays = jax.tree.leaves((params, jax.eval_shape(optimizer.init, params)))
    partitions = jax.tree.leaves((specs.params, specs.opt_state))
    sizes = dict(zip(AXES, (len(plan.replicas), plan.gtp, plan.core_tp), strict=True))
    own = sum(_part_bytes(x.shape, x.dtype, spec, sizes) for x, spec in zip(arrays, partitions, strict=True))
    shapes = zip(core.logical_shapes(params).values(), jax.tree.leaves(params), strict=True)
    logical = [jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in shapes]
    whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((logical, jax.eval_shape(optimizer.init, logical))))
    return own, whole / math.prod(size for axis, size in sizes.items() if axis != DP or core.roles.over_optimizer)


def _part_bytes(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, spec: PartitionSpec, sizes: dict[Any, int]) -> int:
    return elements(box_of(shape, spec, sizes, dict.fromkeys(AXES, 0))) * np.dtype(dtype).itemsize


def _memory(
    replica: Replica,
    leaves: tuple[list[LeafSpecs], list[LeafSpecs], list[LeafSpecs]],
    transfers: tuple[Moves, Moves],
    core: dict[Any, int],
    *,
    state: int,
    activations: int,
) -> tuple[Use, ...]:
    stored, sent, sent_back = leaves
    here = core | {DP: 1, TP: replica.tp}
    own = [_part_bytes(leaf.replica_shape, leaf.dtype, leaf.replica, here) for leaf in sent]
    gradients = sum(_part_bytes(leaf.replica_shape, leaf.dtype, leaf.replica, here) for leaf in sent_back)
    folded, gathered = (
        sum(_part_bytes(leaf.core_shape, leaf.dtype, without_replicas(leaf.core), core) for leaf in some)
        for some in (sent_back, sent)
    )
    divided = any(without_replicas(leaf.core) != leaf.core for leaf in stored)
    buffers = 2 * max(moves.bytes_in_turn for moves in transfers)  # one to send, one to receive
    stores = {slot for row in replica.core for slot in row}
    found = []
    for number, slot in enumerate(slot for row in replica.slots for slot in row):
        rows = zip(own, transfers[0].leaves, stored, strict=True)
        shared = sum(
            n
            for n, leaf, one in rows
            if not divided and leaf.dtype == one.dtype and leaf.before.get(number) == leaf.after[number]
        )
        is_core = slot in stores
        found.append(
            Use(
                masters=state if is_core else 0,
                weights=sum(own) - shared,
                gradients=gradients,
                transfer=buffers + (max(folded, gathered) if is_core else 0),
                activations=activations,
            )
        )
    return tuple(found)


def _owners(of_degree: dict[int, ModelDef]) -> dict[str, dict[int, tuple[int, ...]]]:
    found: dict[str, dict[int, tuple[int, ...]]] = {}
    for tp, model_def in sorted(of_degree.items(), reverse=True):
        for path, layout in with_paths(model_def.layouts):
            if layout.split is not None:
                found.setdefault(".".join(path), {})[tp] = layout.split.owners
    return found


def _check_memory(report: FaultReport, options: FaultOptions) -> None:
    plan, limit_gb = report.plan, options.memory
    uses = [
        (use.total, slot)
        for r, some in zip(plan.replicas, report.memory, strict=True)
        for use, slot in zip(some, (slot for row in r.slots for slot in row), strict=True)
    ]
    most, slot = max(uses)
    if limit_gb is not None and most > limit_gb * _GB:
        degrees = {replica.tp for replica in plan.replicas}
        remedies = {
            "increase `gtp`": True,
            "divide optimizer state over replicas": not options.shard_optimizer and len(plan.replicas) > 1,
            "choose another `core_tp`": not plan.uniform and min(degrees) > 1,
            "leave out replicas of a low degree with `min_tp`": len(degrees) > 1,
        }
        *others, last = (remedy for remedy, applies in remedies.items() if applies)
        text = f"{', '.join(others)}, or {last}" if others else last
        raise ValueError(
            f"the plan needs {quantity(most, 'B')} on the device of slot {slot}, but `memory` is {limit_gb:g} GB. "
            f"{text[0].upper()}{text[1:]}."
        )
