"""Keys of stochastic rounding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def rounding_key(step: jax.Array, microbatch: jax.Array | int) -> jax.Array:
    """Returns the words that this rank rounds by: uint32 `(2,)`. Called in local view.

    They follow from what is being computed alone, so that a run can be repeated, and resumed as if never stopped: the
    number of updates made, the microbatch, and the rank, as every rank has other tokens.
    """
    key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), step)
    mesh = jax.sharding.get_abstract_mesh()
    rank = jnp.uint32(0) if mesh.empty else lax.axis_index(mesh.axis_names).astype(jnp.uint32)
    key = jax.random.fold_in(jax.random.fold_in(key, microbatch), rank)
    return jax.random.key_data(key)
