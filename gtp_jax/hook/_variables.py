"""Finds the variables of a model, and tells which of them are weights to shard."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
from flax import nnx

from ..weights import ModulePath
from ._choice import name_of, names_of

Paths = tuple[ModulePath, ...]  # the paths of one variable (`names_of`), which several modules may hold


def variables_of(model: nnx.Module) -> dict[Paths, nnx.Variable]:
    """Returns the variables of a model. The key of each is a tuple of its paths (`names_of`), of which the first is the
    path in `nnx.state`."""
    names = names_of(model)
    found = {path: v for path, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)}
    return {tuple(dict.fromkeys((path, *names.get(id(v), ())))): v for path, v in found.items()}


def is_weight(variable: nnx.Variable, min_size: int) -> bool:
    """Returns whether a variable is a floating-point `nnx.Param` of at least `min_size` elements without a layout of
    its own. A `gtp_jax.Param` has one."""
    value = variable.get_raw_value()
    if not isinstance(variable, nnx.Param) or not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return False
    own = "layout" in variable.get_metadata()  # of a `gtp_jax.Param`, or of gtp_jax's own layers
    return not own and jnp.issubdtype(value.dtype, jnp.floating) and math.prod(value.shape) >= min_size


def refuse_frozen(variables: dict[Paths, nnx.Variable], min_size: int, own: Collection[int]) -> None:
    """Raises an error if a floating-point parameter of at least `min_size` elements has been frozen: it is no longer an
    `nnx.Param`, so `shard` would pass over it. A `gtp_jax.Param`, or a parameter of gtp_jax's own layers, does not
    count.

    Args:
        variables: the variables of the model.
        min_size: the argument `min_size` of `shard`.
        own: the `id`s of the variables within gtp_jax's own layers.
    """
    for (path, *_), v in variables.items():
        apart = id(v) in own or "layout" in v.get_metadata()
        if getattr(type(v), "constant", False) and not apart and size_of(v.get_raw_value()) >= min_size:
            raise ValueError(
                f"{name_of(path)} has been frozen, by `gtp_jax.nn.lora` or `gtp_jax.nn.freeze`, so it is no longer an "
                "`nnx.Param` to shard. Call `gtp_jax.shard` first, and then freeze it or add adapters: what is frozen "
                "stays sharded."
            )


def size_of(value: Any) -> int:
    floating = hasattr(value, "shape") and hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)
    return math.prod(value.shape) if floating else 0


def of_own_layers(model: nnx.Module) -> set[int]:
    """Returns the `id`s of the variables within gtp_jax's own layers, instances of subclasses included. A module with
    the attribute `wraps_stock` does not count: it is one of gtp_jax, but contains a layer that is not."""
    package = __name__.partition(".")[0]
    own = (
        module
        for _, module in nnx.iter_modules(model)
        if any(base.__module__.partition(".")[0] == package for base in type(module).__mro__)
        and not getattr(type(module), "wraps_stock", False)
    )
    return {id(node) for module in own for _, node in nnx.iter_graph(module) if isinstance(node, nnx.Variable)}


def of_one_layer(model: nnx.Module) -> set[int]:
    """Returns the `id`s of the weights of Flax's layers whose shapes are those of one layer. The first dimension of
    other weights may be that of layers, which `nnx.vmap` has stacked, and over which the model runs a loop."""
    found = set()
    for _, module in nnx.iter_modules(model):
        sizes = [[getattr(module, name, None) for name in names] for names in _SIZES]
        known = [tuple(n for one in own for n in (one if isinstance(one, tuple) else (one,))) for own in sizes]
        for name in ("kernel", "embedding"):
            variable = getattr(module, name, None)
            if isinstance(variable, nnx.Variable) and getattr(variable.get_raw_value(), "shape", None) in known:
                found.add(id(variable))
    return found


# The attributes of Flax's layers that make up the shape of their weights.
_SIZES = (("num_embeddings", "features"), ("in_features", "out_features"), ("kernel_shape",))
