"""Divides the arrays of a batch among ranks, and into microbatches."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ..mesh import Roles, degrees

Tree = Any


def shard_batch(batch: Tree, roles: Roles) -> Tree:
    """Shards each array of the batch over the ranks, so that XLA shards the values computed from it too. Scalars, and
    arrays whose first dimension the ranks cannot divide evenly, stay as they are. Without a mesh, so do all arrays."""
    return jax.tree.map(lambda a: _divided(jnp.asarray(a), roles, 0), batch)


def microbatches_of(path: Any, batch: Any, count: int, roles: Roles) -> jax.Array:
    """Splits an array of the batch into microbatches: microbatch m is `batch[m::count]`, the same on every mesh.

    Raises:
        ValueError: if the array is a scalar, or `count` does not divide its first dimension; the message names the
            array.
    """
    batch = jnp.asarray(batch)
    if batch.ndim == 0 or batch.shape[0] % count:
        raise ValueError(
            f"`batch`{jax.tree_util.keystr(path)} has shape {batch.shape}; its first dimension is the batch and must "
            f"be a multiple of microbatches = {count}."
        )
    return _divided(split_microbatches(batch, count), roles, 1)


def _divided(batch: jax.Array, roles: Roles, dim: int) -> jax.Array:
    whole = jax.sharding.get_abstract_mesh().empty or batch.ndim <= dim or batch.shape[dim] % degrees(roles.batch)
    return batch if whole else _held(batch, PartitionSpec(*(None,) * dim, roles.batch))


@functools.partial(jax.jit, static_argnums=(1,), inline=True)  # outside `jit`, JAX refuses arrays made without the mesh
def _held(batch: jax.Array, spec: PartitionSpec) -> jax.Array:
    return lax.with_sharding_constraint(batch, spec)


def split_microbatches(batch: jax.Array, count: int) -> jax.Array:
    """Splits examples into microbatches: microbatch m is `batch[m::count]`.

    If each rank splits its own part of a batch in this way, microbatch m of the whole batch consists of microbatch m of
    every rank.
    """
    return jnp.swapaxes(jnp.reshape(batch, (-1, count, *batch.shape[1:])), 0, 1)
