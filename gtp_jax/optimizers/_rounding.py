"""Rounds float32 arrays to bfloat16 stochastically."""

from __future__ import annotations

import math
import zlib
from typing import Any

import jax
import jax.extend.random
import jax.numpy as jnp
from jax import lax

from .._mixing import mixed
from ..mesh import Path

_INFINITY = 0x7F800000  # the bits of infinity in float32, also the mask of the exponent


def step_key(seed: int, count: jax.Array) -> jax.Array:
    """Returns the key of a step, from the seed of the run and the number of updates made."""
    return jax.random.fold_in(jax.random.key(seed, impl=_HASH), count)


def rounded(value: jax.Array, key: jax.Array, path: Path) -> jax.Array:
    """Returns a float32 array rounded to one of the two nearest bfloat16 numbers, with a mean equal to the value.

    The random bits depend on the key, the path and the index of an element, and not on the mesh. A bfloat16 number
    stays as it is, Inf and NaN too. No finite number becomes infinite.

    Args:
        value: the array, float32.
        key: the key of the step, from `step_key`.
        path: the path of the array, so that no two arrays use the same random bits.
    """
    words = lax.bitcast_convert_type(value, jnp.uint32)
    up = words + random_bits(key, path, value.shape, jnp.uint16).astype(jnp.uint32)
    words = jnp.where((up & _INFINITY) == _INFINITY, words, up)  # Inf, and what would become Inf
    near = lax.bitcast_convert_type((words >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isnan(value), jnp.bfloat16(jnp.nan), near)


def random_bits(key: jax.Array, path: Path, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns random words for each element of the array at a path, uint16 or uint32; see `rounded`."""
    return jax.random.bits(jax.random.fold_in(key, zlib.crc32(".".join(path).encode())), shape, dtype)


# [Note: random bits of an update] A hash of an element's index takes 11 operations per element by XLA's count;
# threefry, JAX's default, takes 48 and three times as long to compile. Both are elementwise: a device computes the bits
# of its own shard. The hash is an implementation of JAX's keys, so the bits are drawn by `jax.random.bits`. What reads
# the jaxpr of an optimizer, such as `per_layer`, thus knows that they are random.


def _seeded(seed: jax.Array) -> jax.Array:
    return jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))


def _folded(key: jax.Array, number: jax.Array | int) -> jax.Array:
    word = jnp.asarray(number).astype(jnp.uint32)
    return mixed(key ^ jnp.stack([word, ~word]))  # of both words at once, which compiles faster


def _split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    raise NotImplementedError("keys of stochastic rounding are folded, not split")


def _bits(key: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
    """Returns the leading bits of a hash of each element's index, in two parts: that of the row, and that in the row.
    Each part has less than 2**32 values."""
    row, column = jnp.uint32(0), jnp.uint32(0)
    for dim, size in enumerate(shape[:-1]):
        row = row * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, shape, dim)
    if shape:
        column = lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
    assert math.prod(shape[:-1]) < 2**32, shape
    words = mixed(mixed(row ^ key[0]) + key[1] + column)
    return jnp.broadcast_to(words >> (32 - width), shape).astype(jnp.dtype(f"uint{width}"))


_HASH = jax.extend.random.define_prng_impl(
    key_shape=(2,), seed=_seeded, split=_split, random_bits=_bits, fold_in=_folded, name="rounding", tag="rounding"
)
