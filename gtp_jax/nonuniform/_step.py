"""Runs an optimizer step over replicas of unequal degree.

[Note: a step of replicas] The state is on the core, as on any mesh. A step
1. rounds the master weights to the dtype in which they travel, and gathers them over replicas if these divide them
   (ZeRO);
2. for each replica, moves the weights to its own layout, at its own degree (`unfold`); computes the sums of loss,
   tokens and gradients over its own rows, in a separate program; and moves the gradients to the core's layout (`fold`);
3. on the core, adds up the sums of all replicas, divides by the number of all tokens, clips, and updates.
Frozen weights are moved to each replica's layout before the first step, and stay there, because no step changes them.
Nothing is copied between these programs: a device's part of an array on one mesh becomes its part of an array on the
other. Replicas cannot drift apart, because their weights are computed from the masters in each step.

The result is the same as on one mesh because the loss in local view is a sum over sequences, each counted by one rank.
Such a sum may be divided among ranks and replicas in any way. A loss that is not such a sum is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..collectives import reduce_scatter
from ..mesh import DP, GTP, TP, axes_by_dim, axes_of, degree, is_on_host, use_roles
from ..recipes import Recipe, recipe_of_call
from ..train import Computed, Jitted, Request, TrainState, check_values, constrained, mean, never_skip, updated
from ._batches import Batches, is_here
from ._core_metrics import CoreMetrics
from ._frozen_weights import FrozenWeights
from ._gradient_codes import GradientCodes, coded_leaves, sent_back, sum_of_codes
from ._layouts import without_replicas
from ._meshes import ReplicaMeshes
from ._models import check_parameters_only, leaf_specs
from ._replica_dtypes import ReplicaDtypes, replica_dtypes_of
from ._replica_step import ReplicaStep
from ._transfer import Parts, Transfer, of_devices, parts_of, settled

Tree = Any


class NonuniformStep:
    """A step over the replicas of a plan, called like the result of `train_step`. The state is donated.

    Args:
        request: what the step computes.
        optimizer: any optax optimizer.
        max_grad_norm: the norm to which larger gradients are scaled down; `None` for no limit.
        replicas: the replicas and their meshes.
        skip_nonfinite: as in `train_step`.
        options: a function that returns the XLA options for the mesh and the recipe in scope.

    Attributes:
        tell: a function that returns scalars of the core on every process.
    """

    def __init__(
        self,
        request: Request,
        optimizer: optax.GradientTransformation,
        max_grad_norm: float | None,
        replicas: ReplicaMeshes,
        *,
        skip_nonfinite: bool | Literal["loss"],
        options: Callable[[], dict[str, Any]],
    ) -> None:
        self._request, self._replicas, self._options = request, replicas, options
        self._optimizer, self._max_grad_norm, self._skip_nonfinite = optimizer, max_grad_norm, skip_nonfinite
        self._wires: dict[Recipe | None, ReplicaDtypes] = {}
        self._gather: dict[Recipe | None, Any] = {}
        self._update: Any = Jitted(self._updated, options, donate_argnums=(0, 1))
        self._compiled_updates: dict[Recipe | None, Any] = {}
        self.tell = CoreMetrics(replicas)
        self._frozen = FrozenWeights(replicas)
        self._steps: dict[Recipe | None, list[ReplicaStep]] = {}

    def __call__(
        self, state: TrainState, batch: Tree, skip: jax.Array | None = None
    ) -> tuple[TrainState, dict[str, Any]]:
        """Returns the state after the step, and metrics.

        Args:
            state: the state on the core.
            batch: the rows of all replicas, or `Batches`, as `Replicas.place` returns them.
            skip: a bool scalar that says whether to omit the update in any case, such as `skipped` of the step before.

        Raises:
            TypeError: if the step is called under `jax.jit`.
            ValueError: if the state is not on this core, if its model is not the one of `replicas`, or if the size of
                the batch is not that of the plan.
        """
        self._check(state)
        batches = batch if isinstance(batch, Batches) else self._replicas.place(batch)
        stored = self._stored(state)
        gradients: Parts = [{} for _ in range(len(jax.tree.leaves(state.params)) + len(self._wires_of(state).coded))]
        sums: Parts = [{}, {}]
        frozen, meshes = self._frozen(state), self._replicas.meshes
        for step, mesh, own, part in zip(self._replica_steps(state), meshes, frozen, batches.parts, strict=True):
            if is_here(mesh):
                found, total = step(of_devices(stored, mesh), own, part)
                for kept, one in zip((*gradients, *sums), (*found, *map(parts_of, total)), strict=True):
                    kept.update(one)
        with jax.set_mesh(self._replicas.core), use_roles(state.model_def.roles):
            found = self._on_core(state, gradients, sums)
            after, metrics = self._update_of_call()(_without_frozen(state), *found, self._flag(skip), state.frozen)
        settled(after)
        return dataclasses.replace(after, frozen=state.frozen), self.tell(metrics)

    def weights(self, state: TrainState) -> list[Tree]:
        """Returns each replica's parameters as the next step uses them: on its mesh, in the dtypes that they travel in.
        `None` stands for replicas of which this process has no device."""
        stored, replicas = self._stored(state), self._replicas
        return [
            step.weights(of_devices(stored, mesh))[0] if is_here(mesh) else None
            for step, mesh in zip(self._replica_steps(state), replicas.meshes, strict=True)
        ]

    def compile(self, state: TrainState, batch: Tree) -> dict[str, jax.stages.Compiled]:
        """Compiles the programs of a step that this process takes part in. Later steps use them.

        Args:
            state: the state on the core, or its shapes and shardings.
            batch: as in a step, or `Batches` of shapes with shardings.

        Returns:
            The programs by name. For each replica: `gradients`, and `unfold` and `fold` if something moves, each
            followed by the replica's index in the plan. For the core: `update`, and `gather` if replicas divide what is
            stored or weights travel in a narrower dtype. Not included are the programs of single devices that fill and
            take apart buffers, and the moves of frozen weights before the first step and of metrics to other processes.
        """
        batches = batch if isinstance(batch, Batches) else self._replicas.place(batch)
        found: dict[str, jax.stages.Compiled] = {}
        sums: Any = ()
        frozen = self._frozen.shapes(state)
        steps = zip(self._replica_steps(state), self._replicas.meshes, frozen, batches.parts, strict=True)
        for place, (step, mesh, own, part) in enumerate(steps):
            if is_here(mesh):
                programs, sums = step.compile(own, part)
                found |= {f"{name} {place}": program for name, program in programs.items()}
        core, recipe = self._replicas.core, recipe_of_call(self._request.recipe)
        if is_here(core):
            state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
            with jax.set_mesh(core), use_roles(state.model_def.roles):
                if (gather := self._gather_of(state)) is not None:
                    self._gather[recipe] = found["gather"] = _compiled(gather, state)
                shapes = self._shapes_on_core(state, sums)
                args = _without_frozen(state), *shapes, self._flag(None), state.frozen
                self._compiled_updates[recipe] = found["update"] = _compiled(self._update_of_call(), *args)
        return found

    def transfers(self, state: TrainState) -> list[dict[str, Transfer]]:
        """Returns the transfers between each replica and the core: `unfold` for weights, `fold` for gradients."""
        return [{"unfold": step.unfold, "fold": step.fold} for step in self._replica_steps(state)]

    def _replica_steps(self, state: TrainState) -> list[ReplicaStep]:
        """Returns each replica's part of the step, with the recipe in scope."""
        recipe = recipe_of_call(self._request.recipe)
        if recipe not in self._steps:
            replicas, divided = self._replicas, _is_divided(state)
            self._steps[recipe] = [
                ReplicaStep(
                    self._request._replace(recipe=recipe, program=replica.number),
                    replica,
                    mesh,
                    model_def,
                    state,
                    self._wires_of(state),
                    options=self._options,
                    donates=divided,
                )
                for replica, mesh, model_def in zip(
                    replicas.plan.replicas, replicas.meshes, replicas.model_defs, strict=True
                )
            ]
        return self._steps[recipe]

    def _wires_of(self, state: TrainState) -> ReplicaDtypes:
        """Returns the dtypes in which weights and gradients travel, with the recipe in scope."""
        recipe = recipe_of_call(self._request.recipe)
        if recipe not in self._wires:
            with jax.sharding.use_abstract_mesh(self._replicas.core.abstract_mesh):
                reduce_over_dp = "each" if self._request.microbatches == 1 else self._request.reduce_over_dp
                own = state.model_def, state.params, recipe, reduce_over_dp
                wires = replica_dtypes_of(*own, frozen=state.frozen)
            plan, model_defs = self._replicas.plan, self._replicas.model_defs
            coded = coded_leaves(wires.coded, state.model_def, state.params, plan, model_defs)
            self._wires[recipe] = wires._replace(coded=coded)
        return self._wires[recipe]

    def _gather_of(self, state: TrainState) -> Any:
        """Returns the program that rounds and gathers the parameters; `None` if they travel as they are stored."""
        wires, recipe = self._wires_of(state), recipe_of_call(self._request.recipe)
        if not wires.rounded and not _is_divided(state):
            return None
        if recipe not in self._gather:

            def gather(state: TrainState) -> Tree:
                return _gathered(wires, state)

            self._gather[recipe] = Jitted(gather, self._options)
        return self._gather[recipe]

    def _update_of_call(self) -> Any:
        """Returns the program that updates the state, compiled if `compile` was called with the recipe in scope."""
        return self._compiled_updates.get(recipe_of_call(self._request.recipe), self._update)

    def _stored(self, state: TrainState) -> Parts:
        """Returns what the core's devices send: their parts of each parameter, gathered over replicas, and the number
        of updates made."""
        params = state.params
        if is_here(self._replicas.core) and (gather := self._gather_of(state)) is not None:
            with jax.set_mesh(self._replicas.core):
                params = gather(state)
                settled(params)
        return [parts_of(x) for x in (*jax.tree.leaves(params), state.step)]

    def _on_core(self, state: TrainState, gradients: Parts, sums: Parts) -> tuple[Tree, list[jax.Array]]:
        """Returns the sums of all replicas as arrays on the core, concatenated by replica along the first dimension."""
        here = [d for d in self._replicas.core.devices.flat if d.process_index == jax.process_index()]

        def joined(like: jax.ShapeDtypeStruct, parts: Any) -> jax.Array:
            mine = [_with_rows(parts[device], device) for device in here]
            return jax.make_array_from_single_device_arrays(like.shape, like.sharding, mine, dtype=like.dtype)

        shapes, of_sums = self._shapes_on_core(state, [next(iter(one.values())) for one in sums])
        leaves, structure = jax.tree.flatten(shapes)
        arrays = [joined(like, parts) for like, parts in zip(leaves, gradients, strict=True)]
        return jax.tree.unflatten(structure, arrays), [joined(*some) for some in zip(of_sums, sums, strict=True)]

    def _shapes_on_core(self, state: TrainState, sums: Any) -> tuple[Tree, list[Any]]:
        core, count = self._replicas.core, len(self._replicas.meshes)

        def of(spec: PartitionSpec, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Any:
            rows, *rest = shape or (1,)
            sharding = NamedSharding(core, _by_replica(spec, len(shape)))
            return jax.ShapeDtypeStruct((count * rows, *rest), dtype, sharding=sharding)

        wires, gradients = self._wires_of(state), []
        leaves = leaf_specs(state.model_def, state.params, state.model_def, wires.gradients)
        for number, leaf in enumerate(leaves):
            coded = {0: wires.coded[number]} if number in wires.coded else {}
            arrays = [of(one.core, one.core_shape, one.dtype) for one in sent_back([leaf], coded)]
            gradients.append(GradientCodes(*arrays, dim=coded[0]) if coded else arrays[0])
        tree = jax.tree.unflatten(jax.tree.structure(state.params), gradients)
        return tree, [of(PartitionSpec(), x.shape, x.dtype) for x in sums]

    def _flag(self, skip: jax.Array | None) -> jax.Array:
        """Returns, as an array on the core, whether to omit the update; a process without core devices has no part of
        the array."""
        core = self._replicas.core
        return skip if skip is not None and is_here(core) else never_skip(core)

    def _updated(
        self, state: TrainState, found: Tree, sums: list[jax.Array], skip: jax.Array, frozen: Tree
    ) -> tuple[TrainState, dict[str, Any]]:
        specs = state.model_def.specs
        into = jax.tree.map(lambda spec, x: _by_replica(spec, x.ndim), specs, state.params)

        def add_up(found: Tree, sums: list[jax.Array]) -> tuple[Tree, list[jax.Array]]:
            each = jax.tree.map(_sum_over_replicas, specs, found, state.params)
            return each, [one[0] for one in lax.psum(sums, DP)]

        out = (specs, PartitionSpec())
        over_core = jax.shard_map(add_up, in_specs=(into, PartitionSpec(DP)), out_specs=out, check_vma=False)
        found, (total, tokens) = over_core(found, sums)
        computed = Computed(total, tokens, found, {}, ())
        limits: Any = {"max_grad_norm": self._max_grad_norm, "skip_nonfinite": self._skip_nonfinite}
        state = dataclasses.replace(state, frozen=frozen)
        after, metrics = updated(state, computed, self._optimizer, **limits, skip=skip)
        return _without_frozen(after), {"loss": mean(total, tokens), "tokens": tokens, **metrics}

    def _check(self, state: TrainState) -> None:
        check_parameters_only(state.model_def)
        check_values(state)
        core = self._replicas.core
        if isinstance(state.step, jax.core.Tracer):
            raise TypeError("a step over replicas runs several programs, so call it outside of `jax.jit`.")
        if state.step.sharding.device_set != set(core.devices.flat):
            raise ValueError(
                "the state is on other devices than the core of `replicas`. Create it under "
                "`with jax.set_mesh(replicas.core):`."
            )
        if any(map(is_on_host, jax.tree.leaves(state))):
            raise ValueError(
                "the state is partly in the memory of the host (`offload`), which a step over unequal replicas does "
                "not support. Create it without `offload`."
            )
        with jax.set_mesh(core):
            state.model_def.check_mesh()
        ours = jax.tree.structure(state.params)
        theirs = jax.tree.structure(self._replicas.model_defs[0].specs)
        if ours != theirs:
            raise ValueError(
                "the parameters of the state are not those of the model that `replicas` was made for: the model has "
                f"{theirs.num_leaves} parameters, the state {ours.num_leaves}. Pass the same `factory` to both."
            )
        for path, shape in state.model_def.logical_shapes(state.params).items():
            if shape != (wanted := self._replicas.shapes[path]):
                raise ValueError(
                    f"the parameter {'.'.join(path)} of the state has shape {shape}, and {wanted} in the model that "
                    "`replicas` was made for. Pass the same `factory` to both."
                )
        self._frozen.check(state)


def _sum_over_replicas(spec: PartitionSpec, found: jax.Array | GradientCodes, param: Any) -> jax.Array:
    """Returns the part that this rank stores of a gradient's sum over replicas.

    Ranks that store the same part all get the bits of the first of them. Otherwise their bits could differ, because
    each sums over replicas in its own group, and with more than two replicas the groups may add in different orders.
    """
    dims = [dim for dim, axes in enumerate(axes_by_dim(spec)) if DP in axes]
    if isinstance(found, GradientCodes):
        return sum_of_codes(found, dims[0], degree(DP)).astype(param.dtype)
    if dims:
        total = reduce_scatter(found, DP, dim=dims[0])
    else:
        total = lax.psum(found, DP)
    alike = tuple(axis for axis in (GTP, TP) if axis not in axes_of(spec) and degree(axis) > 1)
    if alike:
        total = lax.psum(jnp.where(lax.axis_index(alike) == 0, total, 0), alike)
    total = total.astype(param.dtype)
    return total if param.shape else total[0]


def _gathered(wires: ReplicaDtypes, state: TrainState) -> Tree:
    """Returns the parameters in the dtypes in which they travel, gathered over replicas."""
    leaves, structure = jax.tree.flatten(state.params)
    cast = [x.astype(dtype) for x, dtype in zip(leaves, wires.weights, strict=True)]
    if not _is_divided(state):
        return jax.tree.unflatten(structure, cast)  # arrays that are not rounded stay the same
    specs = jax.tree.leaves(state.model_def.specs)
    rounded = constrained(cast, specs)  # round before the gather
    return jax.tree.unflatten(structure, constrained(rounded, list(map(without_replicas, specs))))


def _without_frozen(state: TrainState) -> TrainState:
    """Returns the state without its frozen weights. A step neither donates nor returns these, because replicas use the
    same arrays."""
    return dataclasses.replace(state, frozen={})


def _compiled(program: Any, *args: Any) -> jax.stages.Compiled:
    return program.lower(*args).compile() if isinstance(program, Jitted) else program


def _is_divided(state: TrainState) -> bool:
    return any(DP in axes_of(spec) for spec in jax.tree.leaves(state.model_def.specs))


def _by_replica(spec: PartitionSpec, ndim: int) -> PartitionSpec:
    """Returns the partition of the replicas' arrays when concatenated along the first dimension."""
    if not ndim:
        return PartitionSpec(DP)
    first, *rest = (*without_replicas(spec), *(None,) * (ndim - len(spec)))
    axes = () if first is None else (first,) if isinstance(first, str) else first
    return PartitionSpec((DP, *axes), *rest)


def _with_rows(part: jax.Array, device: Any) -> jax.Array:
    """Returns an array unchanged, and a scalar as an array of one row, so that those of all replicas can be
    concatenated."""
    if part.ndim:
        return part
    with jax.set_mesh(Mesh(np.array([device]), (DP,))):
        return jnp.reshape(part, (1,))
