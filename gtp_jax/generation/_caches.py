"""Creates the caches of a model, puts them into a copy of the model, and takes them out again."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from ..mesh import degree
from ..nn import AttentionCore, Cache, stacks_of


class KeyValues(NamedTuple):
    """The KV cache of one attention module, for all layers of the `Stack` that contains it, if any.

    Attributes:
        keys: the cached keys, `([layers,] batch, slots, kv_heads, head_dim)`, sharded over the batch and tensor axes.
        values: the cached values, with the same shape and sharding.
        fills: how often the caches have been filled, int32 `([layers])`.
    """

    keys: jax.Array
    values: jax.Array
    fills: jax.Array


# One entry per attention module, in the order in which NNX finds the modules.
Caches = tuple[KeyValues, ...]


def make_caches(model: nnx.Module, batch: int, length: int) -> Caches:
    """Returns empty caches for sequences of up to `length` tokens; a window limits the number of slots to `window`."""
    found = []
    for layers, core in _cores(model):
        slots = length if core.reach.window is None else min(length, core.reach.window)
        empty = jnp.zeros((*layers, batch, slots, core.kv_heads, core.head_dim), core.dtype)
        found.append(KeyValues(empty, empty, jnp.zeros(layers, jnp.int32)))
    return placed(model, tuple(found))


def placed(model: nnx.Module, caches: Caches) -> Caches:
    """Returns a model's caches, sharded over the mesh in scope if there is one."""
    if jax.sharding.get_abstract_mesh().empty:
        return caches
    specs = [_specs(layers, core) for layers, core in _cores(model)]
    return tuple(
        KeyValues(*map(lax.with_sharding_constraint, own, spec)) for own, spec in zip(caches, specs, strict=True)
    )


def put_caches(model: nnx.Module, caches: Caches, *, filled: bool) -> None:
    """Sets the caches of a model's attention modules.

    Args:
        model: the model, which is modified in place.
        caches: the caches, in the order of `make_caches`.
        filled: whether the caches hold tokens; otherwise the next call of the model fills them.
    """
    for (layers, core), own in zip(_cores(model), caches, strict=True):
        core.cached_keys, core.cached_values, core.cache_fills = (
            Cache(array, eager_sharding=False, filled=filled, out_sharding=tuple(spec))
            for array, spec in zip(own, _specs(layers, core), strict=True)
        )


def taken_caches(model: nnx.Module) -> Caches:
    """Returns the caches of a model's attention modules, as its last call left them."""
    found = []
    for _, core in _cores(model):
        variables = core.cached_keys, core.cached_values, core.cache_fills
        found.append(KeyValues(*(variable.get_value() for variable in variables)))
    return placed(model, tuple(found))


def check_filled_once(caches: Caches) -> None:
    """Checks the caches that a forward pass has filled.

    Raises:
        ValueError: if the pass called an attention module more than once. A module has a cache for only one call.
    """
    if any((fills > 1).any() for fills in jax.device_get([own.fills for own in caches])):
        raise ValueError(
            "a `gtp_jax.Attention` is called more than once in a forward pass, but `gtp_jax.generation.generate` gives "
            "it a cache for only one call. Build a module for each call."
        )


def _cores(model: nnx.Module) -> list[tuple[tuple[int, ...], AttentionCore]]:
    """Returns a model's attention modules, each with the leading dimensions of its cache: `(layers,)` in a `Stack`,
    otherwise `()`."""
    stacks = stacks_of(model)
    found = []
    for path, module in nnx.iter_modules(model):
        if isinstance(module, AttentionCore):
            lengths = tuple(stack.length for start, stack in stacks.items() if path[: len(start)] == start)
            found.append((lengths, module))
    return found


def _specs(layers: tuple[int, ...], core: AttentionCore) -> KeyValues:
    """Returns the partitions of an attention module's caches."""
    tensor = core.roles.tensor if degree(core.roles.tensor) > 1 else None
    batch = tuple(axis for axis in core.roles.batch if degree(axis) > 1)
    each = [None for _ in layers]
    of_tokens: Any = PartitionSpec(*each, batch or None, None, tensor, None)
    of_fills: Any = PartitionSpec(*each)
    return KeyValues(of_tokens, of_tokens, of_fills)
