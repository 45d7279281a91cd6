"""Rounds float32 arrays to bfloat16 stochastically."""

from __future__ import annotations

import zlib

import jax
import jax.numpy as jnp
from jax import lax

from ..mesh import Path


def rounded(value: jax.Array, key: jax.Array, path: Path) -> jax.Array:
    """Returns a float32 array rounded to one of the two nearest bfloat16 numbers, with a mean equal to the value.

    The random bits depend on the key, the path and the index of an element, and not on the mesh. A bfloat16 number
    stays as it is. No finite number becomes infinite.

    Args:
        value: the array, float32.
        key: the key of the step.
        path: the path of the array, so that no two arrays use the same random bits.
    """
    key = jax.random.fold_in(key, zlib.crc32(".".join(path).encode()))
    words = lax.bitcast_convert_type(value, jnp.uint32)
    up = words + jax.random.bits(key, value.shape, jnp.uint16).astype(jnp.uint32)
    infinite = jnp.uint32(0x7F800000)
    up = jnp.where((up & infinite) == infinite, words, up)  # beyond the largest bfloat16 number
    near = lax.bitcast_convert_type((up >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where((words & infinite) == infinite, value.astype(jnp.bfloat16), near)


def step_key(seed: int, count: jax.Array) -> jax.Array:
    """Returns the key of a step, from the seed of the run and the number of updates made."""
    return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), count)
