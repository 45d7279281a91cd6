"""Quantizes a model's weights, and attaches to them the weight groups that a recipe decides."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax import lax

from ..recipes import current_recipe
from ..weights import (
    CallKeys,
    Groups,
    Holds,
    Layers,
    ModulePath,
    Prepared,
    Scaling,
    Shards,
    Stored,
    WeightGroup,
    check_ends,
    key_for,
    quantize,
)
from ._layer import value_of
from ._owners import weight_owners, with_weights


def shards_of(model: nnx.Module) -> dict[ModulePath, Shards]:
    """Returns the shards of all weights, by path of their owner: in local view, those that this rank stores; otherwise,
    the whole stored arrays. A frozen weight has an empty tuple."""
    return {path: owner.shards() for path, owner in weight_owners(model).items()}


def with_groups(
    model: nnx.Module,
    groups: Groups,
    prepared: Prepared,
    keys: Mapping[ModulePath, CallKeys] | None = None,
    *,
    scaling: Mapping[ModulePath, Scaling] | None = None,
    placeholders: bool = False,
    rounded: Collection[ModulePath] = (),
) -> Any:
    """Returns a copy of the model that gathers what was prepared. The weight groups determine in which formats the copy
    multiplies, and how it sums gradients. Gradients are still taken with respect to the parameters of the copy.

    Args:
        model: the model, which is not changed.
        groups: the weight groups, as `gtp_jax.weights.resolve` returns them.
        prepared: what `gtp_jax.weights.prepare` returned for the model's weights. A module without an entry prepares
            its weights in each call.
        keys: the keys of stochastic rounding, by path; see `keys_of`. Not needed if no gradients are taken.
        scaling: the scaling by amaxes of earlier steps, by path of each module that is scaled this way.
        placeholders: whether the weights that the optimizer's axes divide are placeholders: arrays of NaN with the
            shapes of whole shards. If so, reading any weight's array raises an error.
        rounded: the paths of modules whose weights have been rounded to the dtype in which they are sent.
    """
    keys, scaling = keys or {}, scaling or {}
    by_path: dict[ModulePath, list[tuple[Layers, WeightGroup]]] = {}
    for (path, layers), group in groups.items():
        by_path.setdefault(path, []).append((layers, group))
    values: dict[ModulePath, Sequence[Any]] = {}
    for path, owner in weight_owners(model).items():
        if not owner.built_group.follows_recipes:
            values[path] = tuple(value_of(weight) for weight in owner.weights())
            continue
        decided = tuple(by_path[path])
        holds = Holds.ROUNDED if path in rounded else Holds.PLACEHOLDER if placeholders else Holds.MASTER
        first, *others = owner.shards()
        values[path] = [
            Stored(first, decided, prepared.get(path, ()), keys.get(path), holds, scaling.get(path)),
            *(Stored(shard, decided, holds=holds) for shard in others),
        ]
    return with_weights(model, values)


def quantized_in_scope(layers: nnx.Module, length: int) -> nnx.Module:
    """Returns a stack's layers with quantized weights. All layers are quantized at once.

    If a step has decided about the weights (`Stored`), they are quantized only if one has been replaced since. If no
    step has, they are quantized only if a recipe is in scope and recipes apply to at least one of them. In all other
    cases, the layers are returned unchanged.
    """
    owners, recipe = weight_owners(layers), current_recipe()
    owners = {path: owner for path, owner in owners.items() if owner.built_group.follows_recipes}
    if any(isinstance(owner.value, Stored) for owner in owners.values()):
        if not any(owner.replaced for owner in owners.values()):
            return layers
    elif recipe is None or not owners:
        return layers
    else:
        check_ends({"one": length}, recipe)
    groups = {
        (path, Layers(at.start, at.stop, ())): group
        for path, owner in owners.items()
        for at, group in owner.groups(length)
    }
    keys = {path: owner.keys for path, owner in owners.items() if owner.keys is not None}
    scaling = {path: own for path, owner in owners.items() if (own := owner.scaling) is not None}
    amaxes = {path: one.of_weight for path, one in scaling.items()}
    made = quantize(groups, lax.stop_gradient(shards_of(layers)), amaxes=amaxes)
    return with_groups(layers, groups, made, keys, scaling=scaling)


def keys_of(key: jax.Array, groups: Groups) -> dict[ModulePath, CallKeys]:
    """Returns the keys of the modules that round gradients stochastically, by path.

    Args:
        key: the key of this step and microbatch, and in local view also of this rank, uint32 `(2,)`.
        groups: the weight groups, as `gtp_jax.weights.resolve` returns them.
    """
    found = {}
    for (path, layers), group in groups.items():
        if group.stochastic and path not in found:
            stack = layers.stack
            own = key_for(key, path) if stack is None else key_for(key_for(key, stack[:-1]), path[len(stack) :])
            found[path] = CallKeys(own)
    return found
