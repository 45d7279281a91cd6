"""Derives the keys of stochastic rounding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def rounding_key(
    seed: int, step: jax.Array, microbatch: jax.Array | int, *, of_rank: bool = False, replica: int = 0
) -> jax.Array:
    """Returns the words of the key that a microbatch is rounded with: uint32 `(2,)`.

    The key depends only on what is being computed, so that a run can be repeated, and resumed as if it had never
    stopped. It is derived from the run's seed, the number of updates made, the microbatch, and in local view
    (`of_rank`) the rank, because each rank has different tokens. In global view a module adds its rank when it is
    called. `replica` tells apart replicas that have separate meshes, whose ranks have the same numbers.
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
