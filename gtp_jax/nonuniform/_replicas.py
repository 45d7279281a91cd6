"""The meshes of replicas of unequal degree, and the model laid out for each."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ..mesh import AXES, DP, GTP, TP, Roles, current_roles, make_mesh, with_paths
from ..nn import ModelDef, MoE, abstract_model, split_model
from ..nonuniform import FaultPlan, Grid, LeafSpecs, exchanged, plan_fold, plan_unfold
from ._replica_dtypes import replica_dtypes_of

Tree = Any


class Replicas:
    """The devices of a plan after failures: a mesh for each replica, and one over all of them, the core.

        replicas = gtp_jax.Replicas(factory, gtp_jax.plan_faults(dp=2, tp=4, failed=[5], batch=14))
        with jax.set_mesh(replicas.core):
            state = gtp_jax.TrainState.create(gtp_jax.init(factory, nnx.Rngs(0)), optimizer)
            step = gtp_jax.train_step(loss, optimizer, view="local", replicas=replicas)
            state, metrics = step(state, batch)

    The core holds master weights and optimizer state, as an ordinary mesh of dp replicas at the lowest degree does: so
    a state is made, saved and restored there as on any mesh. Each replica computes on a mesh of its own, of its own
    degree, with the model laid out for that.

    Args:
        factory: makes the model, as in `gtp_jax.init`.
        plan: which devices go on.
        devices: of all slots of the plan, of the healthy ones, or of the active ones, in the order of slots;
            `jax.devices()` by default.

    Attributes:
        plan: as given.
        core: the mesh to put in scope.
        meshes: one for each replica of the plan.
        model_defs: of the model on each of `meshes`.

    Raises:
        ValueError: if there are more or fewer devices, the roles in scope name other axes than dp, gtp and tp, a term
            of the loss is of the whole batch, which no replica has, or the replicas are unequal and the model holds
            variables other than trained parameters.
    """

    def __init__(
        self, factory: Callable[[nnx.Rngs], nnx.Module], plan: FaultPlan, devices: Sequence[Any] | None = None
    ) -> None:
        roles = current_roles()
        _check_roles(roles)
        self.plan = plan
        by_slot = plan.devices_of(jax.devices() if devices is None else devices)
        self.meshes = tuple(_mesh([replica.slots], by_slot) for replica in plan.replicas)
        if len(plan.active) == plan.slots and plan.uniform and devices is None:
            self.core = make_mesh(dp=plan.dp, gtp=plan.gtp, tp=plan.tp)  # may reorder for the topology
        else:
            self.core = _mesh([replica.core for replica in plan.replicas], by_slot)
        # abstract, as this process may have none of the devices
        self.model_defs = tuple(lay_out(factory, mesh.abstract_mesh)[0] for mesh in self.meshes)
        if not plan.uniform:
            check_parameters_only(self.model_defs[0])
        if len(self.meshes) > 1:
            _check_terms(self.model_defs[0])

    def place(self, batch: Tree) -> Batches:
        """Returns the rows of a batch, on the devices that train on them.

        Args:
            batch: pytree of arrays with the batch first. Several processes all pass the whole batch, as numpy arrays,
                of which each copies only its own rows to its devices.

        Raises:
            ValueError: if an array has another number of rows than the plan, or is spread over several processes.
        """
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            _check_rows(f"`batch`{jax.tree_util.keystr(path)}", leaf, self.plan.batch)
        parts = []
        for replica, mesh in zip(self.plan.replicas, self.meshes, strict=True):
            part = jax.tree.map(lambda a, rows=slice(*replica.rows): np.asarray(a)[rows], batch)
            sharding = NamedSharding(mesh, PartitionSpec((DP, GTP)))
            parts.append(jax.tree.map(lambda a, to=sharding: _placed(a, to), part) if is_here(mesh) else None)
        return Batches(tuple(parts))


@dataclasses.dataclass(frozen=True)
class Batches:
    """A batch, divided among replicas.

    Attributes:
        parts: for each replica a pytree of arrays on its mesh; `None` where this process has none of its devices.
    """

    parts: tuple[Tree, ...]


def is_here(mesh: Mesh) -> bool:
    """Says whether this process has devices of a mesh."""
    return any(device.process_index == jax.process_index() for device in mesh.devices.flat)


def with_whole_sequences(model_def: ModelDef) -> ModelDef:
    """Returns the same model without sequence parallelism, so that the tensor-parallel degree need not divide
    sequences: numbers are the same, and between layers each rank has the whole sequence."""
    model = nnx.merge(model_def.graph, model_def.variables)
    for _, module in nnx.iter_modules(model):
        if getattr(module, "sequence_parallel", False):
            module.sequence_parallel = False  # pyright: ignore[reportAttributeAccessIssue]
    return dataclasses.replace(model_def, graph=nnx.split(model)[0])


def _mesh(grids: Sequence[Grid], by_slot: Mapping[int, Any]) -> Mesh:
    devices = np.array([[[by_slot[slot] for slot in row] for row in grid] for grid in grids], dtype=object)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def lay_out(factory: Callable[[nnx.Rngs], nnx.Module], mesh: AbstractMesh) -> tuple[ModelDef, Tree]:
    """Returns the definition of a model on a mesh, of which no device need be here, and its parameters' shapes."""
    with jax.sharding.use_abstract_mesh(mesh):
        model_def, params, _, _ = split_model(abstract_model(factory))
        return model_def, params


def with_best_core(factory: Callable[[nnx.Rngs], nnx.Module], plan: FaultPlan) -> FaultPlan:
    """Returns the plan with the core at the degree at which the exchanges of a step take least, the sums over replicas
    among them.

    Where a degree divides no dimension of a weight, each rank of tp stores it whole, which is much to move and to sum;
    a core of fewer devices may divide it. Of degrees at which exchanges take as long it is the highest, which stores
    least.
    """
    if plan.uniform:
        return plan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of weights that stay whole, at degrees that are not taken
        of_degree = {tp: lay_out(factory, _abstract(1, plan.gtp, tp))[0] for tp in {r.tp for r in plan.replicas}}

    def in_turn(core_tp: int) -> int:
        mesh = _abstract(len(plan.replicas), plan.gtp, core_tp)
        with warnings.catch_warnings(), jax.sharding.use_abstract_mesh(mesh):
            warnings.simplefilter("ignore")
            core, params = lay_out(factory, mesh)
            wires = replica_dtypes_of(core, params, None)
        of_core = [leaf_specs(core, params, core, dtypes) for dtypes in (wires.weights, wires.gradients)]
        unfold, fold = [], []
        for replica in plan.with_core(core_tp).replicas:
            model_def = of_degree[replica.tp]
            unfold.append(plan_unfold(replica, leaf_specs(core, params, model_def, wires.weights)))
            fold.append(plan_fold(replica, leaf_specs(core, params, model_def, wires.gradients)))
        sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
        return exchanged(of_core[0], of_core[1], unfold, fold, sizes).over_links

    return plan.with_core(min(range(min(replica.tp for replica in plan.replicas), 0, -1), key=in_turn))


def leaf_specs(
    core: ModelDef, params: Tree, replica: ModelDef, dtypes: Sequence[np.dtype] | None = None
) -> list[LeafSpecs]:
    """Returns how the core and a replica store each parameter, or its gradient.

    Args:
        core: of the model on the core.
        params: arrays, or their shapes and dtypes.
        replica: of the model in the replica.
        dtypes: in which they travel; those of the parameters by default.
    """
    specs = [jax.tree.leaves(one.specs, is_leaf=_is_spec) for one in (core, replica)]
    leaves = jax.tree.leaves(params)
    dtypes = [np.dtype(x.dtype) for x in leaves] if dtypes is None else dtypes
    rows = zip(leaves, dtypes, *specs, strict=True)
    return [LeafSpecs(x.shape, dtype, one, other) for x, dtype, one, other in rows]


def _abstract(dp: int, gtp: int, tp: int) -> AbstractMesh:
    return AbstractMesh((dp, gtp, tp), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _check_roles(roles: Roles) -> None:
    wanted = {"batch": (DP, GTP), "weights": (GTP,), "tensor": TP}
    for name, axes in wanted.items():
        if getattr(roles, name) != axes:
            raise ValueError(
                f"the roles in scope have `{name}` {getattr(roles, name)!r}; replicas of unequal degree have {axes!r}, "
                "as each is a mesh of its own. Leave `use_roles` out, or choose only `optimizer` with it."
            )


def check_parameters_only(model_def: ModelDef) -> None:
    """Refuses a model that holds anything but trained parameters.

    Raises:
        ValueError: naming some of it.
    """
    if model_def.state_specs:
        paths = [".".join(path) for path, _ in with_paths(model_def.state_specs, is_leaf=_is_spec)]
        raise ValueError(
            f"the model holds variables other than parameters ({', '.join(paths[:3])}), which every replica of unequal "
            "degree would write for itself. Leave out dropout and batch statistics, or train on one mesh, without "
            "`replicas`."
        )
    if model_def.frozen_specs:
        raise ValueError(
            "the model has frozen weights, which are stored in formats and are not moved between layouts of unequal "
            "degree. Leave out `freeze`, or train on one mesh, without `replicas`."
        )


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)


def _check_terms(model_def: ModelDef) -> None:
    for path, module in nnx.iter_modules(nnx.merge(model_def.graph, model_def.variables)):
        if isinstance(module, MoE) and module.aux_loss_coeff and module.routing.aux_loss == "microbatch":
            raise ValueError(
                f"the MoE at {'.'.join(map(str, path)) or 'the top'} has `aux_loss` 'microbatch', a term of the load "
                "over all ranks, and replicas of unequal degree know only their own. Take `aux_loss='sequence'`, or a "
                "`bias_rate` with `aux_loss_coeff=0`."
            )


def _check_rows(name: str, leaf: Any, rows: int) -> None:
    shape = np.shape(leaf)
    if not shape or shape[0] != rows:
        raise ValueError(
            f"{name} has shape {shape}, but the plan is for batches of {rows} rows, over all replicas. Pass such a "
            f"batch, or plan for another with `plan_faults(batch=...)`."
        )
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise ValueError(
            f"{name} is an array spread over several processes, which cannot be divided into unequal parts without "
            "moving it. Pass the whole batch as numpy arrays in every process, or rows with `Batches`."
        )


def _placed(rows: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index], dtype=rows.dtype)
