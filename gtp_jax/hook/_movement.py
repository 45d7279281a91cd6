"""Gathers weights from their shards, and scatters the gradients of gathered weights to the shards."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec

from ..collectives import all_gather, reduce_scatter
from ..mesh import current_view, degrees
from ._placement import Placement


def gather(shard: jax.Array, placement: Placement) -> jax.Array:
    """Returns the gathered weight.

    In global view, XLA inserts the gather. The inner constraint keeps the gather after the array that the shard waits
    for. Otherwise, XLA would move the gather before the wait, and merge it with the gather of the other pass.
    """
    if current_view() == "global":
        shard = lax.with_sharding_constraint(shard, placement.stored)
        return lax.with_sharding_constraint(shard, placement.used)
    for dim in range(shard.ndim):
        if axes := placement.gathered_axes(dim):
            shard = all_gather(shard, axes, dim=dim)
    return shard


def form_in_use(shard: Any, placement: Placement) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of the gathered weight."""
    sizes = shard.shape
    if current_view() != "global":
        sizes = [size * degrees(placement.gathered_axes(dim)) for dim, size in enumerate(sizes)]
    return jax.ShapeDtypeStruct(tuple(sizes), shard.dtype)


def scatter(gradient: jax.Array, placement: Placement) -> jax.Array:
    """Returns the gradient of the stored array: the gathered weight's gradient, summed over the ranks that share it."""
    if current_view() == "global":
        return lax.with_sharding_constraint(gradient, placement.stored)
    for dim in reversed(range(gradient.ndim)):
        if axes := placement.gathered_axes(dim):
            gradient = reduce_scatter(gradient, axes, dim=dim)
    return gradient


def kept_whole(parameter: Any) -> Any:
    """Returns a parameter that is whole on every rank, constrained so that its gradient is whole too.

    Otherwise, XLA would divide the gradient of a bias among ranks, and with it the bias that an optimizer returns. The
    next step would then be compiled again, because its input would have another sharding.
    """
    if current_view() != "global" or not isinstance(parameter, Tracer):
        return parameter
    return lax.with_sharding_constraint(parameter, PartitionSpec())


def own_part(weight: jax.Array, placement: Placement) -> jax.Array:
    """Returns the part of a gathered weight that each rank stores."""
    if current_view() == "global":
        return lax.with_sharding_constraint(weight, placement.stored)
    for dim in range(weight.ndim):
        if axes := placement.gathered_axes(dim):
            size = weight.shape[dim] // lax.axis_size(axes)
            weight = lax.dynamic_slice_in_dim(weight, lax.axis_index(axes) * size, size, dim)
    return weight
