"""Finds the degree of the core that minimizes a step's transfers."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

from ..mesh import AXES
from ._faults import FaultPlan
from ._layouts import plan_fold, plan_unfold
from ._models import lay_out, leaf_specs
from ._replica_dtypes import replica_dtypes_of
from ._transferred import transferred


def with_best_core(factory: Callable[[nnx.Rngs], nnx.Module], plan: FaultPlan) -> FaultPlan:
    """Returns the plan with the core at the degree that minimizes the bytes of a step's transfers.

    These are the bytes that pass over the links one after another, including those of the sums over replicas; see
    `Transferred.over_links`.

    If a degree divides no dimension of a weight, and the weight cannot be padded (`even_shares`), each rank of tp
    stores the whole weight, and all of these copies must be moved and summed. A core of fewer devices may be able to
    divide it. If several degrees need equally few bytes, the highest is chosen, because its devices store the least.
    """
    if plan.uniform:
        return plan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about weights that stay whole, at degrees that may not be chosen
        of_degree = {tp: lay_out(factory, _abstract(1, plan.gtp, tp)).model_def for tp in {r.tp for r in plan.replicas}}

    def in_turn(core_tp: int) -> float:
        mesh = _abstract(len(plan.replicas), plan.gtp, core_tp)
        with warnings.catch_warnings(), jax.sharding.use_abstract_mesh(mesh):
            warnings.simplefilter("ignore")
            core, params, _, frozen = lay_out(factory, mesh)
            wires = replica_dtypes_of(core, params, None, frozen=frozen)
        of_core = [leaf_specs(core, params, core, dtypes) for dtypes in (wires.weights, wires.gradients)]
        unfold, fold = [], []
        for replica in plan.with_core(core_tp).replicas:
            model_def = of_degree[replica.tp]
            unfold.append(plan_unfold(replica, leaf_specs(core, params, model_def, wires.weights)))
            fold.append(plan_fold(replica, leaf_specs(core, params, model_def, wires.gradients)))
        sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
        return transferred(of_core[0], of_core[1], unfold, fold, sizes).over_links

    return plan.with_core(min(range(min(replica.tp for replica in plan.replicas), 0, -1), key=in_turn))


def _abstract(dp: int, gtp: int, tp: int) -> AbstractMesh:
    return AbstractMesh((dp, gtp, tp), AXES, axis_types=(AxisType.Auto,) * len(AXES))
