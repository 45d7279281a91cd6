"""The state that a training run carries from step to step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._words import Offloaded
from ..hook import evenly_stored, has_weights_to_shard
from ..layout import row_blocks_shape, row_blocks_spec
from ..mesh import (
    Path,
    check_mesh_in_scope,
    degrees,
    is_on_host,
    mesh_of_devices,
    of_parameter,
    on_device,
    with_paths,
)
from ..nn import ModelDef, split_model
from ..recipes import Phases, Recipe, check_recipe, recipe_at
from ._host_memory import choose
from ._layers_as_one import warn_of_layers_as_one
from ._memory import check_held, distinct
from ._optimizer import check_optimizer, of_model
from ._padding import paddings
from ._scaling import ScalingState, first_scaling
from ._state_form import form

Tree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Parameters, optimizer state, step count and the model's other variables: a pytree of arrays.

    Attributes:
        params: a nested dict of the master weights, in the model's parameter dtype (by default float32), sharded by
            `model_def.specs`. Arrays that the mesh cannot divide evenly are padded with zeros (`model_def.padded`);
            `logical` removes the padding.
        opt_state: the state of the optax optimizer. Arrays of a parameter's shape, such as Adam's moments, are sharded
            and padded like the parameter.
        step: the number of updates made, int32.
        model_def: the definition of the model: its structure, and how its arrays are sharded. Static.
        model_state: a nested dict of the model's other variables after the last microbatch, such as batch statistics
            and the words and counts of dropout's keys.
        frozen: a nested dict of the weights that `gtp_jax.nn.freeze` made constant, and of the seeds of adapters'
            dropout; no step changes them.
        scaling: for a recipe with delayed scaling, two float32 arrays for each module that multiplies in its formats,
            by the module's path with names joined by dots; of what `gtp_jax.shard` has sharded, for each weight, by the
            weight's path. `history`, `(*layers, 3, steps)`, has the amaxes (largest magnitudes) of input, weight and
            gradient in earlier steps. `amax`, `(*layers, 3)`, sets the scales of the next step: a scale is the largest
            number of the format divided by `amax`. Replicated on all devices. Empty for other recipes.
    """

    params: dict[str, Any]
    opt_state: Any
    step: jax.Array
    model_def: ModelDef = dataclasses.field(metadata={"static": True})
    model_state: dict[str, Any] = dataclasses.field(default_factory=dict)
    frozen: dict[str, Any] = dataclasses.field(default_factory=dict)
    scaling: ScalingState = dataclasses.field(default_factory=dict)

    @classmethod
    def create(
        cls,
        model: nnx.Module,
        optimizer: optax.GradientTransformation,
        *,
        recipe: Recipe | Phases | None = None,
        offload: Offloaded | None = None,
    ) -> TrainState:
        """Returns the state at step 0, whose parameters are the model's own arrays. Allocates nothing if the model is
        abstract (see `abstract_model`).

        Weights whose dimensions the mesh does not divide are copied and padded, with a warning, so that all devices
        store equal shares; drop the model to free the whole arrays. They stay as they are with `offload`, and if the
        model was created under `gtp_jax.layout.even_shares(False)`.

        Warns if the optimizer treats the layers of a `Stack` as one tensor (see `per_layer`); if no weight is sharded
        although the mesh has an axis that shards weights; and, unless the model is abstract, if there are several
        devices but no mesh in scope.

        Args:
            model: the model.
            optimizer: any optax optimizer.
            recipe: the recipe of the step. It matters only if it has delayed scaling (`gtp_jax.recipes.FP8Delayed`),
                whose amaxes the state keeps. `Phases` have none.
            offload: what the host's memory holds between steps. `"optimizer"`: the arrays of the optimizer's state that
                have a parameter's shape. `"masters"`: these and the parameters; a step copies the parameters to the
                device before it computes. Steps update such arrays in blocks, so their updates must be elementwise.
                Arrays of less than 65,536 elements, or of one dimension, stay on the device. `None` for nothing.

        Raises:
            ValueError: if the mesh in scope has Explicit axes or was set by `with mesh:`, if modules were built under
                different roles, if a weight's array does not have the shape that it was built with, if the model has an
                `nnx.WeightNorm` or `nnx.SpectralNorm`, if the recipe has delayed scaling and does not fit the model, if
                a `per_layer` in the optimizer cannot be mapped over layers, or if this is called while JAX traces; if
                `offload` is an unknown word, or the host has too little memory for it or none that is pinned, or a
                weight is stored padded, or the model is abstract and no mesh is in scope.
            TypeError: if `optimizer` is not an optax optimizer, `recipe` is not a recipe, or `model` is a class or a
                state.
        """
        _check_model(model)
        check_optimizer(optimizer)
        recipe = recipe_at(recipe, 0)
        check_recipe(recipe)
        abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(nnx.state(model)))
        check_mesh_in_scope(creates=not abstract)
        mesh = mesh_of_devices("gtp_jax.TrainState.create")
        scaling: Any = first_scaling(model, recipe)
        stored, padded = evenly_stored(model) if offload is None else (model, [])
        if padded:
            shown = ", ".join(padded[:3]) + (", ..." if len(padded) > 3 else "")
            warnings.warn(
                f"the mesh divides no dimension of {shown}, so the state stores padded arrays, with zeros at their "
                "ends, in equal parts. `train_step` does not count the zeros; updates of your own must be elementwise. "
                "Create the model under `gtp_jax.layout.even_shares()` to pad it too, without this warning; under "
                "`even_shares(False)`, its weights stay whole.",
                stacklevel=2,
            )
        model_def, params, model_state, frozen = split_model(stored)
        warn_of_layers_as_one(optimizer, model_def, params)
        if (ranks := degrees(model_def.roles.weights)) > 1 and has_weights_to_shard(model):
            warnings.warn(
                f"no weight of this model is sharded over {' x '.join(model_def.roles.weights)}, of degree {ranks}: "
                "every device holds the whole model. Pass it through `gtp_jax.shard(model)` first.",
                stacklevel=2,
            )
        specs = state_specs(model_def, optimizer, params, scaling)
        optimizer = of_model(optimizer, model_def)
        away = choose(offload, params, optimizer.init, model_def, mesh)
        if abstract:
            abstract_on_mesh = functools.partial(_abstract, mesh)
            opt_state = jax.tree.map(abstract_on_mesh, jax.eval_shape(optimizer.init, params), specs.opt_state)
            params, opt_state = away.shapes(mesh, (params, opt_state), (specs.params, specs.opt_state))
            step: Any = abstract_on_mesh(jax.ShapeDtypeStruct((), jnp.int32), PartitionSpec())
            model_state = jax.tree.map(abstract_on_mesh, model_state, specs.model_state)
            frozen = jax.tree.map(abstract_on_mesh, frozen, specs.frozen)
            scaling = jax.tree.map(abstract_on_mesh, scaling, specs.scaling)
            return cls(params, opt_state, step, model_def, model_state, frozen, scaling)
        opt_state = away.initial(optimizer.init, params, _shardings(mesh, specs.opt_state))
        params = away.moved(params)
        step = jnp.zeros((), jnp.int32)
        if shardings := _shardings(mesh, PartitionSpec()):
            # A step donates its state. Because of the copies, the model keeps its own batch statistics and counts.
            step, model_state, scaling = jax.device_put(
                (step, jax.tree.map(jnp.copy, model_state), jax.tree.map(jnp.array, scaling)), shardings
            )
        else:
            model_state, scaling = jax.tree.map(jnp.copy, model_state), jax.tree.map(jnp.array, scaling)
        return distinct(cls(params, opt_state, step, model_def, model_state, frozen, scaling))

    def logical(self) -> TrainState:
        """Returns the state with arrays of logical shapes, without padding, for reading or comparing.

        Do not pass the result to a step, which takes only stored shapes. XLA chooses the shardings of arrays from which
        padding was removed; such an array may be replicated on all devices.
        """
        params, frozen = (paddings(self.model_def, tree) for tree in (self.params, self.frozen))
        own = params.cut(self.params), params.cut(self.opt_state), frozen.cut(self.frozen)
        return dataclasses.replace(self, params=own[0], opt_state=own[1], frozen=own[2])

    def model(self) -> Any:
        """Returns the model with the parameters and the other variables of this state.

        Raises:
            ValueError: if the arrays were donated to a step.
        """
        check_held(self)
        return self.model_def.model(on_device(self.params), self.model_state, self.frozen)


def check_state(state: Any) -> None:
    """Raises `TypeError` unless `state` is a `TrainState`."""
    if not isinstance(state, TrainState):
        raise TypeError(
            f"`state` is a {type(state).__name__}; it must be a `gtp_jax.TrainState`, such as "
            "`gtp_jax.TrainState.create(model, optimizer)` makes."
        )


def _check_model(model: Any) -> None:
    if isinstance(model, (type, TrainState)):
        what = f"the class {model.__name__}" if isinstance(model, type) else "a `TrainState`"
        raise TypeError(f"`model` is {what}; it must be an `nnx.Module`, such as `Model(nnx.Rngs(0))`.")


def state_specs(
    model_def: ModelDef, optimizer: optax.GradientTransformation, params: Tree, scaling: Tree = ()
) -> TrainState:
    """Returns the partition of every array of a state, as a `TrainState` with `PartitionSpec` leaves.

    Optimizer state that belongs to a parameter and has its shape, or one element per block of it (`layout.ROW_BLOCK`),
    is sharded like the parameter. If the state stacks several arrays of that shape along leading dimensions, as the
    history of L-BFGS does, the leading dimensions are not sharded. All other optimizer state is replicated.
    """
    shapes = jax.eval_shape(of_model(optimizer, model_def).init, params)
    specs = with_paths(model_def.specs, is_leaf=lambda s: isinstance(s, PartitionSpec))
    parameters = {path: (p.shape, spec) for (path, spec), p in zip(specs, jax.tree.leaves(params), strict=True)}

    def spec_of(path: Path, leaf: Any) -> PartitionSpec:
        owner = of_parameter(path, parameters)
        if owner is None:
            return PartitionSpec()
        shape, spec = owner
        if leaf.shape[leaf.ndim - len(shape) :] == row_blocks_shape(shape) != shape:
            shape, spec = row_blocks_shape(shape), row_blocks_spec(shape, spec)
        if leaf.shape[leaf.ndim - len(shape) :] != shape:
            return PartitionSpec()
        return PartitionSpec(*(None,) * (leaf.ndim - len(shape)), *spec)

    leaf_specs = [spec_of(path, leaf) for path, leaf in with_paths(shapes)]
    opt_specs = jax.tree.unflatten(jax.tree.structure(shapes), leaf_specs)
    own = model_def.state_specs, model_def.frozen_specs, jax.tree.map(lambda _: PartitionSpec(), scaling)
    return TrainState(model_def.specs, opt_specs, PartitionSpec(), model_def, *own)  # pyright: ignore


@contextlib.contextmanager
def of_optimizer(
    model_def: ModelDef, opt_state: Tree, params: Tree, optimizer: optax.GradientTransformation
) -> Iterator[None]:
    """Returns a context for an optimizer's update, which refuses a state that was made for another optimizer.

    A state whose arrays have other paths, shapes or dtypes is refused before the update. If only the types of the nodes
    of `opt_state` differ, the update may still work; the state is then refused only if the update raises an error.

    Raises:
        ValueError: if the state is refused; the message names the first array, or the structure, that differs.
    """
    own = jax.eval_shape(of_model(optimizer, model_def).init, params)
    wanted, found = ({path: form(leaf) for path, leaf in with_paths(tree)} for tree in (own, opt_state))
    path = next((path for path in (*wanted, *found) if wanted.get(path) != found.get(path)), None)
    remedy = (
        "Pass `train_step` the optimizer that `TrainState.create` was called with; to change optimizers, make a new "
        "state: `TrainState.create(state.model(), optimizer)`."
    )
    if path is not None:
        forms = [one.get(path, "no such array") for one in (found, wanted)]
        raise ValueError(
            f"`state.opt_state` is of another optimizer: at {'.'.join(path)!r} it has {forms[0]}, but the "
            f"optimizer of this step has {forms[1]}. {remedy}"
        )
    try:
        yield
    except Exception as error:
        structures = [jax.tree.structure(tree) for tree in (opt_state, own)]
        if structures[0] == structures[1]:
            raise
        raise ValueError(
            f"`state.opt_state` is of another optimizer: it is a {structures[0]}, but the optimizer of this step has "
            f"a {structures[1]}. {remedy}"
        ) from error


def check_optimizer_keeps_forms(before: Tree, after: Tree) -> None:
    """Refuses an optimizer whose update changes the shapes or dtypes of its state, because a later step would need the
    old ones.

    Args:
        before: the optimizer's state before the update.
        after: its state after the update.

    Raises:
        ValueError: if an array is added or lost, or changes its shape or dtype; the message names the first such array.
    """
    had, has = ({path: form(leaf) for path, leaf in with_paths(tree)} for tree in (before, after))
    path = next((path for path in (*had, *has) if had.get(path) != has.get(path)), None)
    if path is not None:
        forms = [one.get(path, "no such array") for one in (had, has)]
        raise ValueError(
            f"the optimizer's `update` changes the form of its state: at {'.'.join(path)!r} from {forms[0]} to "
            f"{forms[1]}. Make `init` and `update` agree, for example with a cast in `update`."
        )


def constrained(tree: Tree, specs: Tree) -> Tree:
    """Constrains the shardings of the arrays in a pytree. Without a mesh in scope, returns the tree unchanged. Arrays
    in the memory of the host keep their shardings.

    Args:
        tree: the pytree.
        specs: a pytree of the same structure with `PartitionSpec` leaves.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    partitions = jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, PartitionSpec))
    pairs = zip(leaves, partitions, strict=True)
    own = [leaf if is_on_host(leaf) else lax.with_sharding_constraint(leaf, spec) for leaf, spec in pairs]
    return jax.tree.unflatten(structure, own)


def _shardings(mesh: Mesh, specs: Any) -> Any:
    if mesh.empty:
        return None
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, PartitionSpec))


def _abstract(mesh: Mesh, shape: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    sharding = None if mesh.empty else NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
