"""Divides the arrays of a batch among ranks, and into microbatches."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ..mesh import Roles, degree, degrees, sequence_axis

Tree = Any

# The names of the arrays of a batch of which every rank reads whole sequences, although they have a number for each
# token, and of those of which a rank reads its part.
WHOLE, BY_TOKEN = ("positions", "segment_ids"), ("tokens", "targets", "weights")


def shard_batch(batch: Tree, roles: Roles) -> Tree:
    """Shards each array of the batch over the ranks, so that XLA shards the values computed from it too: dimension 0
    over the axes of the batch, and dimension 1 over the axis `sequence`, except in arrays of which every rank reads
    whole sequences (`WHOLE`). Scalars, and dimensions that the ranks cannot divide evenly, stay as they are. Without a
    mesh, so do all arrays. Warns of an array whose dimension 0 the ranks cannot divide."""
    return jax.tree_util.tree_map_with_path(lambda path, a: _divided(path, jnp.asarray(a), roles, 0), batch)


def microbatches_of(path: Any, batch: Any, count: int, roles: Roles) -> jax.Array:
    """Splits an array of the batch into microbatches: microbatch m is `batch[m::count]`, the same on every mesh."""
    return _divided(path, split_microbatches(jnp.asarray(batch), count), roles, 1)


def name_of(path: Any) -> Any:
    """Returns the last key of the path of an array in a batch; `None` if it is no key of a mapping."""
    return getattr(path[-1], "key", None) if path else None


def _divided(path: Any, batch: jax.Array, roles: Roles, dim: int) -> jax.Array:
    if jax.sharding.get_abstract_mesh().empty or batch.ndim <= dim:
        return batch
    if batch.shape[dim] % (ranks := degrees(roles.batch)):
        parts = "" if dim == 0 else " of each microbatch"
        warnings.warn(
            f"`batch`{jax.tree_util.keystr(path)} has {batch.shape[dim]} rows{parts}, which the {ranks} ranks of "
            f"{' x '.join(roles.batch)} cannot divide evenly. The step is right, but slow: ranks repeat work. Make "
            f"batches of a multiple of {ranks} rows{' per microbatch' if dim else ''}.",
            stacklevel=2,
        )
        return batch
    axis = sequence_axis(roles, batch.ndim - dim + 1)
    along = axis is not None and name_of(path) not in WHOLE and batch.shape[dim + 1] % degree(axis) == 0
    return _held(batch, PartitionSpec(*(None,) * dim, roles.batch, *((axis,) if along else ())))


@functools.partial(jax.jit, static_argnums=(1,), inline=True)  # outside `jit`, JAX refuses arrays made without the mesh
def _held(batch: jax.Array, spec: PartitionSpec) -> jax.Array:
    return lax.with_sharding_constraint(batch, spec)


def split_microbatches(batch: jax.Array, count: int) -> jax.Array:
    """Splits examples into microbatches: microbatch m is `batch[m::count]`.

    If each rank splits its own part of a batch in this way, microbatch m of the whole batch consists of microbatch m of
    every rank.
    """
    return jnp.swapaxes(jnp.reshape(batch, (-1, count, *batch.shape[1:])), 0, 1)
