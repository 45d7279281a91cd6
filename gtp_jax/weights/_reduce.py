"""Reduces the gradients of gathered weights to those of the arrays that ranks store."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ._exchange import exchange_gradients
from ._fused import Shards, as_shards, in_order, reduce_gradient
from ._group import WeightGroup
from ._optimizer_axes import scatter_stored
from ._wire_spec import ModulePath


@functools.partial(jax.tree_util.register_dataclass, data_fields=("parts", "shards"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class Reduced:
    """The gradients of fused weights, summed over ranks, by name. Each weight's gradient is in one of the attributes.

    Attributes:
        parts: this rank's part of each sum, in the dtype of the sum.
        shards: the gradients of what ranks store, made by `divide_gradients`: in global view, of every weight; in local
            view, of the weights whose shards the optimizer's axes divide, summed over these axes too.
    """

    parts: dict[ModulePath, jax.Array]
    shards: dict[ModulePath, Shards]


def scatter(
    groups: Mapping[ModulePath, WeightGroup], gradients: Mapping[ModulePath, jax.Array]
) -> dict[ModulePath, Shards]:
    """Returns the gradients of what ranks store, given those of fused weights.

    Args:
        groups: the groups of the weights, by name.
        gradients: this rank's gradients of the fused weights, by the same names.
    """
    return in_param_dtypes(
        groups, stored_gradients(groups, divide_gradients(groups, reduce_gradients(groups, gradients)))
    )


def reduce_gradients(groups: Mapping[ModulePath, WeightGroup], gradients: Mapping[ModulePath, jax.Array]) -> Reduced:
    """Sums the gradients of fused weights over the ranks of a gather. Gradients that are exchanged over the same axes,
    in the same format or dtype, share one all-to-all."""
    gradients = {name: _fused(group, gradients[name]) for name, group in groups.items()}
    parts: dict[ModulePath, jax.Array] = {}
    together: dict[Any, list[ModulePath]] = defaultdict(list)
    for name, group in groups.items():
        if group.exchanged is not None and group.ranks > 1:
            together[group.exchanged, group.layouts[0].axes].append(name)
        else:
            parts[name] = reduce_gradient(gradients[name], group.layouts, group.summed.sums)
    for (wire, _), names in together.items():
        layouts = [groups[name].layouts for name in names]
        exchanged = exchange_gradients([gradients[name] for name in names], layouts, wire)
        parts.update(zip(names, exchanged, strict=True))
    return Reduced(parts, {})


def divide_gradients(groups: Mapping[ModulePath, WeightGroup], reduced: Reduced) -> Reduced:
    """Sums over the optimizer's axes the gradients of the weights whose shards these axes divide."""
    divided = {name: _shards_of_sum(groups[name], own) for name, own in reduced.parts.items() if groups[name].divided}
    kept = {name: own for name, own in reduced.parts.items() if name not in divided}
    return Reduced(kept, {**reduced.shards, **divided})


def _shards_of_sum(group: WeightGroup, part: jax.Array) -> Shards:
    """Returns this rank's stored part of a gradient, summed over the optimizer's axes."""
    shards = as_shards(part, group.layouts, (part.dtype,) * len(group.layouts))
    return scatter_stored(shards, group.layouts, group.stored_sums, (group.stored_sums,) * len(group.layouts))


def stored_gradients(groups: Mapping[ModulePath, WeightGroup], reduced: Reduced) -> dict[ModulePath, Shards]:
    """Returns the gradients of what ranks store, in the dtype of their sums."""
    kernels = {name: groups[name].layouts for name in reduced.parts}
    found = {
        name: as_shards(own, kernels[name], (own.dtype,) * len(kernels[name])) for name, own in reduced.parts.items()
    }
    return {**found, **reduced.shards}


def in_param_dtypes(
    groups: Mapping[ModulePath, WeightGroup], gradients: Mapping[ModulePath, Shards]
) -> dict[ModulePath, Shards]:
    """Casts the gradients of what ranks store to the parameters' dtypes."""
    return {
        name: tuple(g.astype(dtype) for g, dtype in zip(own, groups[name].param_dtypes, strict=True))
        for name, own in gradients.items()
    }


def _fused(group: WeightGroup, gradient: jax.Array) -> jax.Array:
    """Returns the gradient of a fused weight, given that of what `gather` returns."""
    if group.array is None:
        return gradient
    matrix = group.array.matrix
    *ahead, rows, cols = matrix.use_shape
    ranks = matrix.ranks if in_order(group.layouts) else 1
    shape = (ranks, *ahead, rows // ranks, cols) if ahead else (rows, cols)
    take = jax.linear_transpose(group.array.from_fused, jax.ShapeDtypeStruct(shape, gradient.dtype))
    return take(jnp.reshape(gradient, group.array.use_shape))[0]
