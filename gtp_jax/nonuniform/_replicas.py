"""Builds the meshes of replicas of unequal degree, and lays out the model on each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..experts import MoE
from ..mesh import AXES, DP, GTP, TP, Roles, current_roles, make_mesh
from ..nn import ModelDef
from ..train import Request, View, check_numbers
from ._batches import Batches, is_here
from ._faults import FaultPlan, Grid
from ._models import check_parameters_only, lay_out
from ._step import NonuniformStep

Tree = Any


class Replicas:
    """The meshes of a plan after failures: one for each replica, and the core, which has devices of all replicas.

        plan = gtp_jax.nonuniform.plan_faults(dp=2, tp=4, failed=[5], batch=14)
        replicas = gtp_jax.nonuniform.Replicas(factory, plan)
        with jax.set_mesh(replicas.core):
            state = gtp_jax.TrainState.create(gtp_jax.init(factory, nnx.Rngs(0)), optimizer)
            step = gtp_jax.train_step(loss, optimizer, view="local", replicas=replicas)
            state, metrics = step(state, batch)

    The core is an ordinary mesh, with one rank of dp per replica and the degree `plan.core_tp`. It stores master
    weights and optimizer state, so a state is made, saved and restored there as on any mesh. Each replica computes on
    its own mesh, at its own degree, with the model laid out for that mesh. The core and each replica pad weights that
    their degrees do not divide, in their own way (`gtp_jax.layout.even_shares`).

    Args:
        factory: the function that makes the model, as in `gtp_jax.init`.
        plan: the plan that names the devices that continue.
        devices: the devices of all slots of the plan, of the healthy ones, or of the active ones, in the order of
            slots; by default `jax.devices()`.

    Attributes:
        plan: the plan.
        core: the mesh to put in scope.
        meshes: the mesh of each replica of the plan.
        model_defs: the definition of the model on each of `meshes`.
        shapes: the shape of each parameter, without padding, by path.

    Raises:
        ValueError: if the number of devices is wrong, if `batch`, `weights` or `tensor` of the roles in scope are not
            the default ones, or if the replicas are unequal and either a term of the loss depends on the whole batch,
            or the model holds variables that are neither trained parameters nor frozen weights.
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
        # abstract meshes, because this process may have none of the devices
        models = [lay_out(factory, mesh.abstract_mesh) for mesh in self.meshes]
        self.model_defs = tuple(model.model_def for model in models)
        self.shapes = models[0].model_def.logical_shapes(models[0].params)
        if not plan.uniform:
            check_parameters_only(self.model_defs[0])
            if len(self.meshes) > 1:
                _check_terms(self.model_defs[0])

    def own_step(
        self,
        request: Request,
        optimizer: optax.GradientTransformation,
        *,
        max_grad_norm: float | None,
        skip_nonfinite: bool | Literal["loss"],
        options: Callable[[], dict[str, Any]],
    ) -> NonuniformStep | None:
        """Returns the step over these replicas, for `train_step`; `None` if the replicas are equal.

        Raises:
            ValueError: if the step runs in global view.
        """
        if self.plan.uniform:
            return None
        _check_view(request.view)
        return NonuniformStep(request, optimizer, max_grad_norm, self, skip_nonfinite=skip_nonfinite, options=options)

    def place(self, batch: Tree) -> Batches:
        """Places the rows of a batch on the devices that train on them.

        Args:
            batch: a pytree of arrays whose first dimension is the batch. With several processes, each passes the whole
                batch as numpy arrays, and copies only its own rows to its devices.

        Raises:
            ValueError: if the number of rows of an array is not that of the plan, or if an array is spread over several
                processes.
        """
        check_numbers(batch)
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            _check_rows(f"`batch`{jax.tree_util.keystr(path)}", leaf, self.plan.batch)
        parts = []
        for replica, mesh in zip(self.plan.replicas, self.meshes, strict=True):
            part = jax.tree.map(lambda a, rows=slice(*replica.rows): np.asarray(a)[rows], batch)
            sharding = NamedSharding(mesh, PartitionSpec((DP, GTP)))
            parts.append(jax.tree.map(lambda a, to=sharding: _placed(a, to), part) if is_here(mesh) else None)
        return Batches(tuple(parts))


def _mesh(grids: Sequence[Grid], by_slot: Mapping[int, Any]) -> Mesh:
    devices = np.array([[[by_slot[slot] for slot in row] for row in grid] for grid in grids], dtype=object)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _check_roles(roles: Roles) -> None:
    wanted = {"batch": (DP, GTP), "weights": (GTP,), "tensor": TP}
    for name, axes in wanted.items():
        if getattr(roles, name) != axes:
            raise ValueError(
                f"the roles in scope have `{name}` {getattr(roles, name)!r}; `Replicas` needs {axes!r}, because "
                "each replica is a mesh of its own. Leave `use_roles` out, or set only `optimizer` with it."
            )


def _check_view(view: View) -> None:
    if view == "global":
        raise ValueError(
            "`replicas` of unequal degree compute on different examples, each on a mesh of its own, so code in "
            "`view='global'`, which may mix all examples of a batch, would see only some of them. Pass `view='local'` "
            "if the loss is a sum over sequences and every operation is written for a rank's own sequences."
        )


def _check_terms(model_def: ModelDef) -> None:
    for path, module in nnx.iter_modules(model_def.template.merged(model_def.variables)):
        if isinstance(module, MoE) and module.aux_loss_coeff and module.routing.aux_loss == "microbatch":
            raise ValueError(
                f"the MoE at {'.'.join(map(str, path)) or 'the top'} has `aux_loss` 'microbatch', a term of the load "
                "over all ranks, but each replica of unequal degree knows only its own load. Use "
                "`aux_loss='sequence'`, or a `bias_rate` with `aux_loss_coeff=0`."
            )


def _check_rows(name: str, leaf: Any, rows: int) -> None:
    shape = np.shape(leaf)
    if not shape or shape[0] != rows:
        raise ValueError(
            f"{name} has shape {shape}, but the plan is for batches of {rows} rows over all replicas. Pass such a "
            f"batch, or plan for another size with `plan_faults(batch=...)`."
        )
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise ValueError(
            f"{name} is an array spread over several processes, which cannot be divided into unequal parts without "
            "moving it. Pass the whole batch as numpy arrays in every process, or each replica's rows as `Batches`."
        )


def _placed(rows: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index], dtype=rows.dtype)
