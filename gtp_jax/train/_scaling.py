"""Keeps the amaxes of earlier steps in a state, and derives the scales of a step from them (delayed scaling).

An amax is the largest magnitude in a tensor. With delayed scaling, as in TransformerEngine, the scale of an FP8 operand
follows from the amaxes of earlier steps instead of the operand's own.

[Note: delayed scaling]
`TrainState.scaling` holds two arrays for each module that a recipe with delayed scaling (`FP8Delayed`) quantizes, or,
of what `gtp_jax.shard` has sharded, for each weight: the amaxes of earlier steps, and the amaxes that set the scales of
the next step. In this file, a module may also be such a weight. The amaxes of a step are maxima over its calls,
microbatches and ranks:

- The amax of a weight is that of its master copy. The update reduces the amaxes of all weights over the ranks as one
  vector.
- The amaxes of a module's input and of the gradient of its output are found in backward. Each module has a slot: an
  array of zeros, whose gradient is defined to be these amaxes. If a module is called several times, JAX combines the
  gradients of its slot by their maximum instead of their sum (`hook.maximum_gradient`). Microbatches are combined by
  their maximum too. The ranks then reduce one vector per step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Float32

from ..formats import DelayedScaling, Operands
from ..hook import Coded, delayed, maximum_gradient, recipe_of_step
from ..layout import Layout
from ..mesh import current_roles, current_view, degrees
from ..nn import groups_of, shards_of
from ..recipes import Recipe
from ..weights import ModulePath, Scaling, amaxes_of_weights

# Two float32 arrays for each module, by its path with names joined by dots. "history", `(*layers, 3, steps)`, has the
# amaxes of input, weight and gradient in earlier steps: the last entry is the newest, and the first is always 0.
# "amax", `(*layers, 3)`, has the amaxes that set the scales of the next step.
ScalingState = dict[str, dict[str, Any]]


def first_scaling(model: nnx.Module, recipe: Recipe | None) -> ScalingState:
    """Returns the scaling of a state at step 0: histories of zeros, and amaxes that give scales of 1. Empty unless the
    recipe has delayed scaling.

    Raises:
        ValueError: if the weight of one layer does not have two dimensions, as when layers are stacked without a
            `Stack`; or if the recipe does not fit the model.
    """
    if recipe is None or not recipe.delays:
        return {}
    found, shards = {}, shards_of(model)
    for path, own in _scaled(model, recipe).items():
        lead = () if own.layers is None else (own.layers,)
        shape = shards[path][0].shape if own.sharded is None else None
        if shape is not None and len(shape) != len(lead) + 2:
            raise ValueError(
                f"the recipe scales {_name(path)} by amaxes of earlier steps, but its weight has shape {shape}, with "
                "more dimensions than the weight of one layer. Stack layers with `gtp_jax.Stack`, or use "
                "`gtp_jax.FP8(matmuls=True)`, which scales each operand by its own amax."
            )
        history = np.zeros((*lead, 3, own.delayed.history), np.float32)
        found[_name(path)] = {"history": history, "amax": np.broadcast_to(own.largest, (*lead, 3))}
    return found


def amaxes_in_use(scaling: ScalingState, model: nnx.Module, recipe: Recipe | None) -> dict[ModulePath, jax.Array]:
    """Returns the amaxes that set the scales of a step, float32 `(*layers, 3)`, for each module with delayed scaling,
    by path.

    In local view, the amaxes of gradients are multiplied by the number of ranks that count the same loss (`_copies`),
    because the gradients there are larger by that factor.

    Args:
        scaling: the scaling of the state.
        model: the model.
        recipe: the recipe of this step.

    Raises:
        ValueError: if the scaling of a module is missing, or has a history of another length; or if in local view
            several ranks count the same loss, and there is a weight that `gtp_jax.shard` has sharded, because only code
            around it says how much of its gradient each of them has. The message names the module.
    """
    scaled, copies = _scaled(model, recipe), _copies()
    for path, one in scaled.items():
        name, steps = _name(path), one.delayed.history
        own = scaling.get(name)
        if own is None or own["history"].shape[-1] != steps:
            has = "nothing" if own is None else f"a history of {own['history'].shape[-1]} steps"
            raise ValueError(
                f"the recipe scales {name or 'the model'} by the amaxes of {steps} earlier steps, but `state.scaling` "
                f"has {has} for it. Make the state with the step's recipe: "
                "`gtp_jax.TrainState.create(model, optimizer, recipe=recipe)`."
            )
        if one.sharded is not None and copies > 1:
            raise ValueError(
                f"the recipe scales {name}, a weight that `gtp_jax.shard` has sharded, by amaxes of earlier steps, but "
                f"in local view {copies} ranks compute with the same examples, so the amax of its gradient depends on "
                "code around it. Use `view='global'`, or `gtp_jax.FP8(matmuls=True)`."
            )
    factors = np.array([1, 1, copies], np.float32)
    return {path: scaling[_name(path)]["amax"] * factors for path in scaled}


def slots_of(amaxes: Mapping[ModulePath, jax.Array]) -> dict[ModulePath, jax.Array]:
    """Returns the slots of modules: zeros whose gradients are amaxes; see [Note: delayed scaling]."""
    return {path: Scaling.slot_for(amax) for path, amax in amaxes.items()}


def scaling_of(
    amaxes: Mapping[ModulePath, jax.Array], slots: Mapping[ModulePath, jax.Array]
) -> dict[ModulePath, Scaling]:
    """Returns the scaling for each module's matmuls: its amaxes, and its slot in the dtype whose gradients are combined
    by their maximum."""
    return {path: Scaling(amax, maximum_gradient(slots[path])) for path, amax in amaxes.items()}


def over_ranks(found: Mapping[ModulePath, jax.Array]) -> dict[ModulePath, jax.Array]:
    """Returns the maximum over all ranks of each module's amaxes, `(*layers, 2)`, by path. All modules share one
    all-reduce of a single vector. In local view, divides the amaxes of gradients by `_copies`.

    Args:
        found: the gradients of the slots, by path.
    """
    view, names = current_view(), jax.sharding.get_abstract_mesh().axis_names
    if view is None or not found or not names:
        return {path: jnp.maximum(own, 0) for path, own in found.items()}
    if view == "global":
        vector = jnp.concatenate([_of_each_rank(own) for own in found.values()], axis=1)
        vector = jnp.max(lax.with_sharding_constraint(vector, PartitionSpec(names)), axis=0)
    else:
        vector = lax.pmax(jnp.concatenate([jnp.ravel(own) for own in found.values()]), names)
    vector = jnp.maximum(vector, 0)  # the gradient of a slot that no call has read may be -Inf
    shapes = {path: (*own.shape[:-1], 2) for path, own in found.items()}
    parts = jnp.split(vector, np.cumsum([np.prod(shape) for shape in shapes.values()])[:-1])
    copies = np.array([1, _copies()], np.float32)
    return {path: jnp.reshape(part, shape) / copies for (path, shape), part in zip(shapes.items(), parts, strict=True)}


def amaxes_of_step(
    model: nnx.Module, recipe: Recipe | None, found: Mapping[ModulePath, jax.Array]
) -> dict[ModulePath, jax.Array]:
    """Returns the amaxes of each module's input, weight and gradient in a step, float32 `(*layers, 3)`, by path.

    Call this outside the branch that updates the masters, and before it. Inside the branch, XLA may schedule
    these reads after the update has begun to overwrite the masters, and would then copy all masters beforehand.

    Args:
        model: the model with the master weights before the update.
        recipe: the recipe of this step.
        found: the amaxes of inputs and gradients in this step, `(*layers, 2)`, by path, as `over_ranks` returns them.
    """
    if not found:
        return {}
    scaled, stored = _scaled(model, recipe), {}
    for path, own in scaled.items():
        if own.sharded is not None:
            form, array = own.sharded
            stored[path] = (form.to_matrix(array),)
    layouts = {path: own.layouts for path, own in scaled.items()}
    weights = amaxes_of_weights(layouts, {**shards_of(model), **stored})
    return {path: jnp.stack([own[..., 0], weights[path], own[..., 1]], axis=-1) for path, own in found.items()}


def updated_scaling(
    scaling: ScalingState, model: nnx.Module, recipe: Recipe | None, now: Mapping[ModulePath, jax.Array]
) -> ScalingState:
    """Returns the scaling of the next step. Returns `scaling` unchanged if `now` is empty.

    Args:
        scaling: the scaling of this step.
        model: the model.
        recipe: the recipe of this step.
        now: the amaxes of this step, as `amaxes_of_step` returns them.
    """
    if not now:
        return scaling
    after = dict(scaling)
    for path, one in _scaled(model, recipe).items():
        own = scaling[_name(path)]
        history, amax = next_amaxes(own["history"], own["amax"], now[path], one.delayed, one.largest)
        after[_name(path)] = {"history": history, "amax": amax}
    return after


def next_amaxes(
    history: Float32[jax.Array, "*lead steps"],
    amax: Float32[jax.Array, "*lead"],
    now: Float32[jax.Array, "*lead"],
    delayed: DelayedScaling,
    largest: Float32[np.ndarray, "*lead"],
) -> tuple[Float32[jax.Array, "*lead steps"], Float32[jax.Array, "*lead"]]:
    """Returns the history after a step, and the amaxes that set the scales of the next step.

    A scale is `largest / amax`, where `amax` is the amax that the history gives, times `2**delayed.margin`. If the
    history gives an amax of 0, or one that is not finite, the old amax is kept. If it gives an amax so small that the
    scale would overflow float32, the scale is the largest float32 number.

    Args:
        history: the amaxes of earlier steps.
        amax: the amaxes that set the scales of this step.
        now: the amaxes of this step.
        delayed: how an amax follows from the history.
        largest: the largest number of each format.
    """
    history = history.at[..., 0].set(now)
    top = now if delayed.algorithm == "most_recent" else jnp.max(history, axis=-1)
    usable = (top > 0) & jnp.isfinite(top)
    least = largest / np.finfo(np.float32).max
    scaled = jnp.clip(top * np.float32(2.0**delayed.margin), least, np.finfo(np.float32).max)
    return jnp.roll(history, -1, axis=-1).at[..., 0].set(0), jnp.where(usable, scaled, amax)


def _copies() -> int:
    """Returns how many ranks count the loss of the same example: 1 in global view and without a mesh.

    In local view, the ranks along an axis that does not shard the batch have the same examples. Each adds its loss to
    the sum, which multiplies all gradients by this factor. The amaxes in a state are those of gradients without it.
    """
    if current_view() != "local":
        return 1
    names, batch = jax.sharding.get_abstract_mesh().axis_names, current_roles().batch
    return degrees(tuple(axis for axis in names if axis not in batch))


class _Scaled(NamedTuple):
    """A module with delayed scaling.

    Attributes:
        operands: the formats of its operands.
        layouts: the layouts of its kernels.
        layers: its number of layers; `None` outside a `Stack`.
        sharded: the way in which a weight of `gtp_jax.shard` is quantized, and its stored array; see `hook.delayed`.
            `None` for other modules.
    """

    operands: Operands
    layouts: Sequence[Layout]
    layers: int | None
    sharded: tuple[Coded, Any] | None = None

    @property
    def delayed(self) -> DelayedScaling:
        """How its scales follow from earlier steps."""
        assert self.operands.delayed is not None
        return self.operands.delayed

    @property
    def largest(self) -> np.ndarray:
        """The largest number of each of three formats: that of the input, of the weight and of the gradient."""
        each = self.operands.activation, self.operands.weight, self.operands.gradient
        return np.array([one.largest for one in each], np.float32)


def _scaled(model: nnx.Module, recipe: Recipe | None) -> dict[ModulePath, _Scaled]:
    """Returns the modules that a recipe scales by amaxes of earlier steps, by path."""
    if recipe is None or not recipe.delays:
        return {}
    found: dict[ModulePath, _Scaled] = {}
    groups = groups_of(model, recipe)
    lengths: dict[ModulePath, int] = {}
    for path, layers in groups:
        lengths[path] = max(lengths.get(path, 0), layers.stop)
    for (path, layers), group in groups.items():
        if group.operands is not None and group.delayed is not None:
            length = None if layers.stack is None else lengths[path]
            found[path] = _Scaled(group.operands, group.layouts, length)
    with recipe_of_step(recipe):
        sharded = delayed(model)
    for path, (form, array) in sharded.items():
        assert form.operands is not None
        found[path] = _Scaled(form.operands, (form.layout,), None, (form, array))
    return found


def _of_each_rank(own: jax.Array) -> jax.Array:
    """Reshapes amaxes from `(*layers, ranks * 2)` to `(ranks, layers * 2)`."""
    parts = jnp.moveaxis(jnp.reshape(own, (*own.shape[:-1], -1, 2)), -2, 0)
    return jnp.reshape(parts, (len(parts), -1))


def _name(path: ModulePath) -> str:
    return ".".join(map(str, path))
