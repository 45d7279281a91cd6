"""Keeps the amaxes of earlier steps in a state, and derives the scales of a step from them (delayed scaling).

An amax is the largest magnitude in a tensor. With delayed scaling, as in TransformerEngine, the scale of an FP8 operand
follows from the amaxes of earlier steps instead of the operand's own.

[Note: delayed scaling]
`TrainState.scaling` holds two arrays for each module that a recipe with delayed scaling (`FP8Delayed`) quantizes: the
amaxes of earlier steps, and the amaxes that set the scales of the next step. The amaxes of a step are maxima over its
calls, microbatches and ranks:

- The amax of a weight is that of its master copy. The update reduces the amaxes of all weights over the ranks as one
  vector.
- The amaxes of a module's input and of the gradient of its output are found in backward. Each module has a slot: an
  array of zeros, whose gradient is defined to be these amaxes. If a module is called several times, JAX combines the
  gradients of its slot by their maximum instead of their sum (`nn.maximum_gradient`). Microbatches are combined by
  their maximum too. The ranks then reduce one vector per step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Float32

from ..formats import DelayedScaling, Operands
from ..mesh import current_roles, current_view, degrees
from ..nn import groups_of, maximum_gradient, shards_of
from ..recipes import Recipe
from ..weights import Groups, ModulePath, Scaling, amaxes_of_weights, ranks_spec

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
    for path, (layers, operands, delayed) in _delayed(groups_of(model, recipe)).items():
        lead = () if layers is None else (layers,)
        shape = shards[path][0].shape
        if len(shape) != len(lead) + 2:
            raise ValueError(
                f"the recipe scales {_name(path)} by amaxes of earlier steps, but its weight has shape {shape}, with "
                "more dimensions than the weight of one layer. Stack layers with `gtp_jax.Stack`, or use "
                "`gtp_jax.FP8(matmuls=True)`, which scales each operand by its own amax."
            )
        history = np.zeros((*lead, 3, delayed.history), np.float32)
        found[_name(path)] = {"history": history, "amax": np.broadcast_to(_largest(operands), (*lead, 3))}
    return found


def check_scaling(scaling: ScalingState, groups: Groups) -> None:
    """Refuses a state without the scaling that a recipe needs.

    Args:
        scaling: the scaling of the state.
        groups: the weight groups of the model under the recipe.

    Raises:
        ValueError: if the scaling of a module is missing, or has a history of another length; the message names the
            module.
    """
    for path, (_, _, delayed) in _delayed(groups).items():
        name, steps = _name(path), delayed.history
        own = scaling.get(name)
        if own is None or own["history"].shape[-1] != steps:
            has = "nothing" if own is None else f"a history of {own['history'].shape[-1]} steps"
            raise ValueError(
                f"the recipe scales {name or 'the model'} by the amaxes of {steps} earlier steps, but `state.scaling` "
                f"has {has} for it. Make the state with the step's recipe: "
                "`gtp_jax.TrainState.create(model, optimizer, recipe=recipe)`."
            )


def amaxes_in_use(scaling: ScalingState, groups: Groups) -> dict[ModulePath, jax.Array]:
    """Returns the amaxes that set the scales of a step, float32 `(*layers, 3)`, for each module with delayed scaling,
    by path.

    In local view, the amaxes of gradients are multiplied by the number of ranks that count the same loss (`_copies`),
    because the gradients there are larger by that factor.
    """
    copies = np.array([1, 1, _copies()], np.float32)
    return {path: scaling[_name(path)]["amax"] * copies for path in _delayed(groups)}


def slots_of(amaxes: Mapping[ModulePath, jax.Array]) -> dict[ModulePath, jax.Array]:
    """Returns the slots of modules: zeros whose gradients are amaxes; see [Note: delayed scaling].

    In local view, or without a mesh, a slot is `(*layers, 2)`: one zero for this rank's amax of the input, and one for
    that of the gradient of the output. In global view, it is `(*layers, ranks * 2)`, with the zeros of all ranks,
    sharded by `ranks_spec`.
    """
    ranks = jax.sharding.get_abstract_mesh().size if current_view() == "global" else 1

    def slot(amax: jax.Array) -> jax.Array:
        zeros = jnp.zeros((*amax.shape[:-1], 2 * ranks), jnp.float32)
        if current_view() != "global":
            return zeros
        return lax.with_sharding_constraint(zeros, ranks_spec(stacked=amax.ndim > 1))

    return {path: slot(amax) for path, amax in amaxes.items()}


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
    groups = groups_of(model, recipe)
    weights = amaxes_of_weights(
        {path: group.layouts for (path, _), group in groups.items() if path in found}, shards_of(model)
    )
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
    for path, (_, operands, delayed) in _delayed(groups_of(model, recipe)).items():
        own = scaling[_name(path)]
        history, amax = next_amaxes(own["history"], own["amax"], now[path], delayed, _largest(operands))
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


def _delayed(groups: Groups) -> dict[ModulePath, tuple[int | None, Operands, DelayedScaling]]:
    """Returns, for each module with delayed scaling, by path: its number of layers (`None` outside a `Stack`), the
    formats of its operands, and how their scales follow from earlier steps."""
    lengths: dict[ModulePath, int] = {}
    for path, layers in groups:
        lengths[path] = max(lengths.get(path, 0), layers.stop)
    return {
        path: (None if layers.stack is None else lengths[path], group.operands, group.delayed)
        for (path, layers), group in groups.items()
        if group.operands is not None and group.delayed is not None
    }


def _largest(operands: Operands) -> np.ndarray:
    """Returns the largest number of each of three formats: that of the input, of the weight and of the gradient."""
    return np.array([one.largest for one in (operands.activation, operands.weight, operands.gradient)], np.float32)


def _of_each_rank(own: jax.Array) -> jax.Array:
    """Reshapes amaxes from `(*layers, ranks * 2)` to `(ranks, layers * 2)`."""
    parts = jnp.moveaxis(jnp.reshape(own, (*own.shape[:-1], -1, 2)), -2, 0)
    return jnp.reshape(parts, (len(parts), -1))


def _name(path: ModulePath) -> str:
    return ".".join(map(str, path))
