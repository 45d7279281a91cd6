"""A model's weights under a recipe."""

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
    Shards,
    Stored,
    WeightGroup,
    check_ends,
    key_for,
    quantize,
)
from ._layer import value_of
from ._weight import weight_owners, with_weights


def shards_of(model: nnx.Module) -> dict[ModulePath, Shards]:
    """Returns what this rank stores of all weights, by path of the module that owns them, of frozen ones nothing; in
    global view whole arrays."""
    return {path: owner.shards() for path, owner in weight_owners(model).items()}


def with_groups(
    model: nnx.Module,
    groups: Groups,
    prepared: Prepared,
    keys: Mapping[ModulePath, CallKeys] | None = None,
    *,
    placeholders: bool = False,
    rounded: Collection[ModulePath] = (),
) -> Any:
    """Returns a copy of the model that gathers what was prepared, and multiplies and sums gradients as its weight
    groups say. Gradients still go to its own parameters.

    Args:
        model: is left as it is.
        groups: as `gtp_jax.weights.resolve` returns them.
        prepared: what `gtp_jax.weights.prepare` made of its weights; each module prepares its own where there is none.
        keys: keys of stochastic rounding, by path, see `keys_of`; without gradients none.
        placeholders: whether the model's weights are placeholders: arrays of NaN of whole shards.
        rounded: modules whose weights have been rounded to the dtype in which they travel.
    """
    keys = keys or {}
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
            Stored(first, decided, prepared.get(path, ()), keys.get(path), holds),
            *(Stored(shard, decided, holds=holds) for shard in others),
        ]
    return with_weights(model, values)


def quantized_in_scope(layers: nnx.Module, length: int) -> nnx.Module:
    """Returns the layers of a stack, quantized here, as the recipe in scope says; as they are if there is none, or they
    have been quantized already, and are still the same."""
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
    return with_groups(layers, groups, quantize(groups, lax.stop_gradient(shards_of(layers))), keys)


def keys_of(key: jax.Array, groups: Groups) -> dict[ModulePath, CallKeys]:
    """Returns keys of the modules that round stochastically, by path.

    Args:
        key: uint32 `(2,)`: of this step, microbatch and rank.
        groups: as `gtp_jax.weights.resolve` returns them.
    """
    found = {}
    for (path, layers), group in groups.items():
        if group.stochastic and path not in found:
            stack = layers.stack
            own = key_for(key, path) if stack is None else key_for(key_for(key, stack[:-1]), path[len(stack) :])
            found[path] = CallKeys(own)
    return found
