"""Digests of arrays: of their values, the same whatever mesh holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Odd, so that multiplication by them loses no bit; the first two are the golden ratio's and the square root of three's.
_LANES = (0x9E3779B1, 0xBB67AE85)
_DIMS = (0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1, 0x2545F491, 0x9FB21C65, 0xE6546B65, 0x1B873593)


def digests(arrays: Sequence[jax.Array]) -> list[str]:
    """A digest of each array, 16 hexadecimal digits.

    Two sums modulo 2^32, over the elements, of a bijective mix of the element's bits and its place. A sum does not
    depend on its order, so neither does the digest on how the array is cut; and as the mix is bijective, a change of
    any one element always shows. Computed where the arrays are, in one pass at memory bandwidth.

    Raises:
        TypeError: on a dtype without a fixed number of bytes.
    """
    found = _all_sums(list(arrays))
    return [_text(np.asarray(pair.addressable_data(0))) for pair in found]


class Digest:
    """The digest of an array that is in memory only a part at a time; the parts may come in any order."""

    def __init__(self) -> None:
        self._sums = np.zeros(len(_LANES), np.uint32)

    def add(self, begin: int, part: np.ndarray) -> None:
        """Takes in a part: the array's indices of the first dimension from `begin` on."""
        size = part.dtype.itemsize
        # Without 64-bit types in jax, words of 32: the same bits.
        words = part.view(f"uint{8 * min(size, 4)}")
        if size == 8:
            words = words.reshape(*part.shape, 2)
        self._sums += np.asarray(_part_sums(words, np.uint32(begin)))

    def text(self) -> str:
        """As `digests` has it."""
        return _text(self._sums)


def _text(sums: np.ndarray) -> str:
    return "".join(f"{int(value):08x}" for value in sums)


@jax.jit
def _all_sums(arrays: list[jax.Array]) -> list[jax.Array]:
    return [_sums(array, 0) for array in arrays]


@jax.jit
def _part_sums(words: jax.Array, begin: jax.Array) -> jax.Array:
    return _sums(words, begin)


def _sums(array: jax.Array, begin: jax.Array | int) -> jax.Array:
    words = _words(array)
    place = jnp.full(words.shape, jnp.asarray(begin, jnp.uint32) * jnp.uint32(_DIMS[0]))
    for dim in range(words.ndim):
        constant = jnp.uint32(_DIMS[dim % len(_DIMS)] + 2 * (dim // len(_DIMS)))
        place += lax.broadcasted_iota(jnp.uint32, words.shape, dim) * constant
    return jnp.stack([jnp.sum(_mix(words * jnp.uint32(lane) ^ place), dtype=jnp.uint32) for lane in _LANES])


def _words(array: jax.Array) -> jax.Array:
    """The bits of the elements in words of 32, a trailing dimension of two for elements of 64."""
    kind: Any = array.dtype
    if kind == jnp.bool_:
        return array.astype(jnp.uint32)
    bits = jnp.iinfo(kind).bits if jnp.issubdtype(kind, jnp.integer) else 0
    bits = jnp.finfo(kind).bits if jnp.issubdtype(kind, jnp.floating) else bits
    if not bits:
        raise TypeError(f"an array of {kind} has no digest; integers, floats and booleans have.")
    if bits == 64:
        return lax.bitcast_convert_type(array, jnp.uint32)
    return lax.bitcast_convert_type(array, f"uint{bits}").astype(jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    """MurmurHash3's finalizer (Appleby, public domain): bijective on 32 bits."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
