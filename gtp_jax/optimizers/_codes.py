"""Moments as 8-bit codes, with a scale for each block."""

from __future__ import annotations

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._words import MOST
from ..formats import E4M3
from ..layout import ROW_BLOCK, row_blocks_shape
from ..mesh import Path
from ._rounding import random_bits

# [Note: moments in FP8] A code is an e4m3 number, which times the scale of its block, a power of two, is the moment, or
# for a mean of squares its square root. Scales are of 16 elements along the last dimension of the logical array,
# whatever the mesh: where shards are whole blocks, encoding needs no communication.
#
# Rounding is stochastic, with a mean equal to the moment: rounded to nearest, a mean of squares would stay where it is,
# because a step changes it by 0.1 % (`b2=0.999`), and neighboring codes differ by 6 % or more.
#
# Adam divides by the square root of a mean of squares. If one of these became 0, or far too small, next to others in
# its block, the update would explode. Stored as its square root, it is at least 2**-18 of the largest in the block, or
# rounded up to that, and within a factor of 2 of its value otherwise.

CODE = jnp.float8_e4m3fn
_BIAS = 127  # of the exponent of a float32
_LEAST = E4M3.min_exponent + _BIAS
_MOST_EXPONENT = 8  # that of the largest code, 1.75 * 2**8
_FRACTION_OF_MOST = 0x600000  # 0.75, the fraction of the same number, in the bits of a float32
_LOWEST_SCALE = -126


class Kind(enum.Enum):
    """A kind of moment: a mean of gradients, or of their squares."""

    MEAN = enum.auto()
    SQUARES = enum.auto()


class Codes(NamedTuple):
    """A moment as codes.

    Attributes:
        codes: float8_e4m3fn, with the shape of the moment.
        scales: the binary logarithm of the scale of each block, int8; see `layout.row_blocks_shape`.
    """

    codes: jax.Array
    scales: jax.Array


def encoded(value: jax.Array, kind: Kind, key: jax.Array, path: Path) -> Codes:
    """Returns a moment as codes, rounded stochastically, so that the mean of the decoded moment is the moment.

    Zero stays zero. A mean of squares that is positive, and at least the smallest normal float32, stays positive; what
    is below the smallest code is rounded up to it. Inf and NaN become NaN, and do not change other elements. The random
    bits depend on the key, the path and the index of an element, and not on the mesh.

    Args:
        value: the moment, float32, with one dimension or more.
        kind: what it is.
        key: the key of the step, from `step_key`.
        path: the path of the array, so that no two arrays use the same random bits.
    """
    size = jnp.abs(value)
    size = jnp.sqrt(size) if kind is Kind.SQUARES else size
    finite = jnp.isfinite(value)
    size = jnp.where(finite, size, 0)
    scales = _scales(_over_blocks(size))
    scaled = size * _spread(_power(-scales), value.shape[-1])
    exponent = jnp.maximum(_exponent(scaled), _LEAST - _BIAS) - E4M3.mantissa_bits
    steps = scaled * _power(-exponent)
    below = jnp.floor(steps)
    share = steps - below  # exact
    if kind is Kind.SQUARES:  # of the distance between the squares of both neighbors
        share = share * (steps + below) / (2 * below + 1)
    words = random_bits(key, path, value.shape, jnp.uint32)
    code = below + (share > (words >> 8).astype(jnp.float32) * 2.0**-24)
    if kind is Kind.SQUARES:
        code = jnp.where(size > 0, jnp.maximum(code, 1), code)
    code = jnp.where(finite, jnp.copysign(code * _power(exponent), value), jnp.nan)
    return Codes(code.astype(CODE), scales.astype(jnp.int8))


def decoded(moment: Codes, kind: Kind) -> jax.Array:
    """Returns a moment, float32, given as codes."""
    scale = _spread(_power(moment.scales.astype(jnp.int32)), moment.codes.shape[-1])
    value = moment.codes.astype(jnp.float32) * scale
    value = value * jnp.abs(value) if kind is Kind.SQUARES else value
    return jnp.clip(value, -MOST, MOST)


def _scales(largest: jax.Array) -> jax.Array:
    """Returns the least exponents of scales, int32, with which no number is above the largest code."""
    above = (lax.bitcast_convert_type(largest, jnp.int32) & 0x7FFFFF) > _FRACTION_OF_MOST
    return jnp.maximum(_exponent(largest) - _MOST_EXPONENT + above, _LOWEST_SCALE)


def _over_blocks(size: jax.Array) -> jax.Array:
    """Returns the largest number of each block, given numbers of at least 0."""
    *ahead, blocks = row_blocks_shape(size.shape)
    if more := blocks * ROW_BLOCK - size.shape[-1]:
        size = jnp.pad(size, [*((0, 0) for _ in ahead), (0, more)])
    return jnp.max(size.reshape(*ahead, blocks, ROW_BLOCK), -1)


def _spread(blocks: jax.Array, size: int) -> jax.Array:
    """Returns an array with `size` elements in the last dimension, each that of its block."""
    wide = jnp.broadcast_to(blocks[..., None], (*blocks.shape, ROW_BLOCK))
    return wide.reshape(*blocks.shape[:-1], -1)[..., :size]


def _exponent(value: jax.Array) -> jax.Array:
    """Returns the exponents of numbers of at least 0, int32; -127 for zero and subnormal numbers."""
    return (lax.bitcast_convert_type(value, jnp.int32) >> 23) - _BIAS


def _power(exponent: jax.Array) -> jax.Array:
    """Returns powers of two, float32, of exponents between -126 and 127."""
    return lax.bitcast_convert_type((exponent + _BIAS) << 23, jnp.float32)
