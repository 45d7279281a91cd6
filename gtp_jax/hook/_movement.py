"""Gathers weights from their shards, and scatters the gradients of gathered weights to the shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec

from ..collectives import all_gather, reduce_scatter
from ..layout import Placement, cut, pad
from ..mesh import current_view, degrees
from ..weights import on_ranks


def gather(shard: jax.Array, placement: Placement) -> jax.Array:
    """Returns the gathered weight, without padding.

    In global view, XLA inserts the gather between two sharding constraints.
    """
    if current_view() == "global":
        shard = lax.with_sharding_constraint(shard, placement.stored)
        return cut(lax.with_sharding_constraint(shard, placement.used), placement)
    for dim in range(shard.ndim):
        if axes := placement.gathered_axes(dim):
            shard = all_gather(shard, axes, dim=dim)
    return cut(shard, placement)


def gather_on_ranks(shards: Sequence[jax.Array], placements: Sequence[Placement]) -> list[jax.Array]:
    """Returns what `gather` returns for each shard. In traced code in global view, every rank gathers explicitly, so
    that XLA cannot do it elsewhere than where the program says. The result has no derivative."""
    if current_view() != "global" or not any(isinstance(shard, Tracer) for shard in shards):
        return [gather(shard, placement) for shard, placement in zip(shards, placements, strict=True)]

    def of_ranks(shards: list[jax.Array]) -> list[jax.Array]:
        return [gather(shard, placement) for shard, placement in zip(shards, placements, strict=True)]

    into, out = [one.stored for one in placements], [one.used for one in placements]
    return on_ranks(of_ranks, (into,), out)(list(shards))


def form_in_use(shard: Any, placement: Placement) -> jax.ShapeDtypeStruct:
    """Returns the shape of the gathered weight, without padding, and the dtype of its shard."""
    sizes = shard.shape
    if current_view() != "global":
        sizes = [size * degrees(placement.gathered_axes(dim)) for dim, size in enumerate(sizes)]
    return jax.ShapeDtypeStruct(placement.without_padding(sizes), shard.dtype)


def scatter(gradient: jax.Array, placement: Placement) -> jax.Array:
    """Returns the gradient of the stored array, partitioned like that array, given the gradient of the gathered weight.
    In local view, sums over the axes over which the weight is gathered; in global view, XLA inserts the sum."""
    gradient = pad(gradient, placement)
    if current_view() == "global":
        return lax.with_sharding_constraint(gradient, placement.stored)
    for dim in reversed(range(gradient.ndim)):
        if axes := placement.gathered_axes(dim):
            gradient = reduce_scatter(gradient, axes, dim=dim)
    return gradient


def kept_whole(parameter: Any) -> Any:
    """Returns its argument, a parameter that is whole on every rank. In global view, if the parameter is traced,
    constrains it and its gradient to be whole.

    Without the constraint, XLA could shard the gradient of a bias, for example, and then also the updated bias that an
    optimizer returns. The next step, which reads the bias, would then be compiled again for the new sharding.
    """
    if current_view() != "global" or not isinstance(parameter, Tracer):
        return parameter
    return lax.with_sharding_constraint(parameter, PartitionSpec())


def own_part(weight: jax.Array, placement: Placement) -> jax.Array:
    """Returns the part of a gathered weight that this rank stores; in global view, the weight in its stored
    partition."""
    weight = pad(weight, placement)
    if current_view() == "global":
        return lax.with_sharding_constraint(weight, placement.stored)
    for dim in range(weight.ndim):
        if axes := placement.gathered_axes(dim):
            size = weight.shape[dim] // lax.axis_size(axes)
            weight = lax.dynamic_slice_in_dim(weight, lax.axis_index(axes) * size, size, dim)
    return weight
