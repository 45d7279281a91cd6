"""Derives the random keys of a microbatch, for stochastic rounding and for the dropout of adapters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def rounding_key(
    seed: int, step: jax.Array, microbatch: jax.Array | int, *, of_rank: bool = False, replica: int = 0
) -> jax.Array:
    """Returns the key of a microbatch, as words of uint32, `(2,)`.

    The key depends only on the arguments and, with `of_rank`, on the rank. A run can therefore be repeated exactly, and
    a resumed run uses the same keys as one that was never interrupted.

    Args:
        seed: the seed of the run.
        step: the number of updates made.
        microbatch: the number of the microbatch.
        of_rank: whether to fold in the rank, inside a `shard_map`. Stochastic rounding in local view needs this,
            because each rank rounds other numbers. In global view, modules fold in the rank themselves.
        replica: the number of the replica, if replicas have separate meshes, whose ranks have the same numbers.
    """
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step)
    key = jax.random.fold_in(key, microbatch)
    if replica:
        key = jax.random.fold_in(key, (1 << 31) + replica)  # no microbatch has such a number
    mesh = jax.sharding.get_abstract_mesh()
    if of_rank:
        rank = jnp.uint32(0) if mesh.empty else lax.axis_index(mesh.axis_names).astype(jnp.uint32)
        key = jax.random.fold_in(key, rank)
    return jax.random.key_data(key)
