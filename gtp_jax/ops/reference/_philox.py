"""Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11), which computes random words from
a counter."""

from __future__ import annotations

import jax
import jax.numpy as jnp

ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[jax.Array, ...], key: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
    """Returns four random words, computed from four counter words and two key words; all are uint32, and broadcast."""
    a, b, c, d = counter
    first, second = key
    for _ in range(ROUNDS):
        high_a, low_a = _wide_multiply(a, _MULTIPLIERS[0])
        high_c, low_c = _wide_multiply(c, _MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ first, low_c, high_a ^ d ^ second, low_a
        first, second = first + jnp.uint32(_WEYL[0]), second + jnp.uint32(_WEYL[1])
    return a, b, c, d


def random_bytes(shape: tuple[int, ...], key: jax.Array, copy: int) -> jax.Array:
    """Returns 16 random bytes for each run of 16 elements, as int32 `(*shape, 16)` from 0 to 255.

    Args:
        shape: the shape of the array of runs, which are counted in C order.
        key: uint32 `(2,)`.
        copy: 0 for the row-wise copy, 1 for the column-wise copy.
    """
    runs = 1
    for size in shape:
        runs *= size
    assert runs < 2**32, "the high word of the counter would be in use"
    index = jnp.reshape(jnp.arange(runs, dtype=jnp.uint32), shape)
    zero = jnp.zeros_like(index)
    words = philox((index, zero, zero + jnp.uint32(copy), zero), (key[0], key[1]))
    shifts = jnp.arange(0, 32, 8, dtype=jnp.uint32)
    octets = jnp.stack(words, axis=-1)[..., None] >> shifts & 0xFF
    return jnp.reshape(octets, (*shape, 16)).astype(jnp.int32)


def _wide_multiply(a: jax.Array, b: int) -> tuple[jax.Array, jax.Array]:
    a_high, a_low, b_high, b_low = a >> 16, a & 0xFFFF, jnp.uint32(b >> 16), jnp.uint32(b & 0xFFFF)
    middle = a_high * b_low + (a_low * b_low >> 16)
    cross = a_low * b_high + (middle & 0xFFFF)
    return a_high * b_high + (middle >> 16) + (cross >> 16), a * jnp.uint32(b)
