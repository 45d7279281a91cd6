"""A model's weights under a recipe."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import jax
from flax import nnx
from jax import lax

from ..collectives import Shards, gather_stored
from ..layout import Layout
from ..mesh import current_view, stacked_spec
from ..recipes import Recipe, current_recipe
from ..weights import (
    CallKeys,
    Groups,
    Joined,
    Layers,
    Path,
    Quantized,
    Stored,
    WeightGroup,
    check_ends,
    join_stored,
    key_for,
    quantize,
    resolve,
)
from ._layer import value_of
from ._ranks import by_rank, on_ranks, ranks_spec
from ._weight import structure_of, weight_owners, with_weights


def quantize_weights(model: nnx.Module, recipe: Recipe, pregathered_layers: int | Literal["all"] = 0) -> Quantized:
    """Quantizes the weights of a model in local view, as the recipe says; see `gtp_jax.weights.quantize`.

    Raises:
        ValueError: if the recipe speaks of modules or layers that the model does not have; if codes are to be gathered
            ahead and no layer of a stack has any.
    """
    return quantize(resolve(structure_of(model), recipe), shards_of(model), pregathered_layers)


def shards_of(model: nnx.Module) -> dict[Path, Shards]:
    """Returns what this rank stores of all weights, by path of the module that owns them, of frozen ones nothing; in
    global view whole arrays."""
    return {path: owner.shards() for path, owner in weight_owners(model).items()}


def with_groups(
    model: nnx.Module,
    groups: Groups,
    quantized: Quantized,
    keys: Mapping[Path, CallKeys] | None = None,
    joined: Joined | None = None,
    *,
    stands_in: bool = False,
    rounded: Collection[Path] = (),
) -> Any:
    """Returns a copy of the model that gathers these codes and shards, and multiplies and sums gradients as its weight
    groups say. Gradients still go to its own parameters.

    Args:
        model: is left as it is.
        groups: as `gtp_jax.weights.resolve` returns them.
        quantized: what `gtp_jax.weights.quantize` made of them.
        keys: of stochastic rounding, by path, see `keys_of`; without gradients none.
        joined: what `gtp_jax.weights.join_stored` made of what ranks store; each module joins its own by default.
        stands_in: whether the model's weights are placeholders, as `as_shards` makes them.
        rounded: modules whose weights have been rounded to the dtype in which they travel.
    """
    keys, joined = keys or {}, joined or {}
    by_path: dict[Path, list[tuple[Layers, WeightGroup]]] = {}
    for (path, layers), group in groups.items():
        by_path.setdefault(path, []).append((layers, group))
    values: dict[Path, Sequence[Any]] = {}
    for path, owner in weight_owners(model).items():
        if not owner.built_group.follows_recipes:
            values[path] = tuple(value_of(weight) for weight in owner.weights())
            continue
        decided, shards = tuple(by_path[path]), owner.shards()
        ahead = joined.get(path, {})
        stored = []
        for i, shard in enumerate(shards):
            first = {"packed": quantized.get(path, ()), "keys": keys.get(path)} if i == 0 else {}
            own = tuple(kernels[i] for kernels in ahead.values())
            kind = {"stands_in": stands_in, "rounded": path in rounded}
            stored.append(Stored(shard, decided, joined=own, starts=tuple(ahead), **kind, **first))
        values[path] = stored
    return with_weights(model, values)


def quantized_in_scope(layers: nnx.Module, length: int) -> nnx.Module:
    """Returns the layers of a stack, quantized here, as the recipe in scope says; as they are if there is none, or they
    have been quantized already, and are still the same."""
    owners, recipe = weight_owners(layers), current_recipe()
    owners = {path: owner for path, owner in owners.items() if owner.built_group.follows_recipes}
    if any(isinstance(owner.value, Stored) for owner in owners.values()):
        if not any(owner.changed for owner in owners.values()):
            return layers
    elif recipe is None or not owners:
        return layers
    else:
        check_ends({"one": length}, recipe)
    groups = {
        (path, at._replace(stack=())): group for path, owner in owners.items() for at, group in owner.groups(length)
    }
    keys = {path: owner.keys for path, owner in owners.items() if owner.keys is not None}
    return with_groups(layers, groups, quantize_in_view(groups, lax.stop_gradient(shards_of(layers))), keys)


def quantize_in_view(
    groups: Groups, shards: Mapping[Path, Shards], pregathered_layers: int | Literal["all"] = 0
) -> Quantized:
    """Returns `gtp_jax.weights.quantize(...)` of shards, or in global view of whole weights, where codes are every
    rank's own."""
    groups = {at: group for at, group in groups.items() if not group.frozen}
    if current_view() != "global":
        return quantize(groups, shards, pregathered_layers)
    by_module = {path: (layers, group) for (path, layers), group in groups.items()}
    specs = {
        path: tuple(stacked_spec(layout.spec, x.ndim) for layout, x in zip(group.layouts, shards[path], strict=True))
        for path, (_, group) in by_module.items()
    }

    def local(shards: Mapping[Path, Shards]) -> tuple[Quantized, Quantized]:
        found = by_rank(quantize(groups, shards, pregathered_layers))
        of_stacks = {path: packed for path, packed in found.items() if by_module[path][0].stack is not None}
        return of_stacks, {path: packed for path, packed in found.items() if path not in of_stacks}

    own = {path: shards[path] for path in by_module}
    of_stacks, others = on_ranks(local, (specs,), (ranks_spec(stacked=True), ranks_spec()))(own)
    return {**of_stacks, **others}


def join_in_view(
    groups: Groups, stored: Mapping[Path, Shards], written_out: Collection[Path], rounded: Collection[Path] = ()
) -> Joined:
    """Returns `gtp_jax.weights.join_stored(...)`; in global view of global arrays, which are then sharded as a gather
    wants them."""
    if current_view() != "global":
        return join_stored(groups, stored, written_out, rounded=rounded)

    def gather(stored: Shards, layouts: Sequence[Layout], dtype: Any) -> Shards:
        into = tuple(stacked_spec(layout.spec, x.ndim) for layout, x in zip(layouts, stored, strict=True))
        out = tuple(stacked_spec(layout.of_shards.spec, x.ndim) for layout, x in zip(layouts, stored, strict=True))
        return on_ranks(lambda stored: gather_stored(stored, layouts, dtype), (into,), out)(stored)

    return join_stored(groups, stored, written_out, gather)


def keys_of(key: jax.Array, groups: Groups) -> dict[Path, CallKeys]:
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
