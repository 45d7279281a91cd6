"""Dequantization: `code * scale`, rounded to float32 and then to the requested dtype."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from ...formats import ELEMENTS, Format
from . import _ieee, _minifloat
from ._blocks import from_blocks, over_blocks, over_matrices, to_blocks, unpack_nibbles
from ._quantize import _whole_scale


# traced once for all pieces of the same shape, of which a layer of experts has many
@functools.partial(jax.jit, static_argnames=("format", "columns", "shape", "dtype"), inline=True)
def dequantize(
    codes: jax.Array,
    scales: jax.Array,
    amax: jax.Array,
    *,
    format: Format,
    columns: bool,
    shape: tuple[int, ...],
    dtype: jnp.dtype,
) -> jax.Array:
    """Returns the array of logical `shape`, in `dtype`. Operands that the format does not have are ignored."""
    by_columns = columns and not format.transposed_columns
    if by_columns:
        codes, scales = jnp.swapaxes(codes, -1, -2), jnp.swapaxes(scales, -1, -2)
    rows, cols = (shape[-1], shape[-2]) if columns else (shape[-2], shape[-1])
    codes = codes.astype(jnp.int32)
    if format.element_bits == 4:
        codes = unpack_nibbles(codes, cols)
    bits = _values(codes, scales.astype(jnp.int32), _ieee.as_bits(amax), format)
    values = _ieee.narrow(bits, dtype)
    assert values.shape[-2:] == (rows, cols)
    return jnp.swapaxes(values, -1, -2) if columns else values


def _values(codes: jax.Array, scales: jax.Array, amax: jax.Array, format: Format) -> jax.Array:
    if format.block is None:
        one = jnp.full_like(amax, _ieee.ONE)
        return _times(codes, over_matrices(_ieee.divide(one, _whole_scale(amax, format)), codes.ndim), format)
    if format.scale == "e4m3":
        factor = _e4m3_factor(scales, over_matrices(amax, scales.ndim))
    else:
        factor = jnp.where(scales == 0, 0x00400000, scales << 23)
        factor = jnp.where(scales == 0xFF, _ieee.NAN, factor)
    values = _times(to_blocks(codes, format.block), over_blocks(factor), format)
    return from_blocks(values, codes.shape[-2:])


def _e4m3_factor(scales: jax.Array, amax: jax.Array) -> jax.Array:
    """Returns the bits of `(float(scale) * amax) * (1 / 2688)`, in that association."""
    e4m3 = ELEMENTS["e4m3"]
    significand, exponent = _minifloat.split(scales, e4m3)
    magnitude = amax & _ieee.MAGNITUDE
    finite = jnp.minimum(magnitude, _ieee.MAX)
    amax_significand, amax_exponent = _ieee.split(finite)
    product = _ieee.round_to_float32(significand * amax_significand, exponent + amax_exponent)
    # a product that is infinite before the second factor remains infinite
    factor = _ieee.multiply(jnp.minimum(product, _ieee.MAX), jnp.full_like(product, _ieee.constant(1 / 2688)))
    factor = jnp.where((product == _ieee.INFINITY) | (magnitude == _ieee.INFINITY), _ieee.INFINITY, factor)
    nan = _minifloat.is_nan(scales, e4m3) | (magnitude > _ieee.INFINITY)
    nan |= (magnitude == _ieee.INFINITY) & (significand == 0)
    negative = _minifloat.is_negative(scales, e4m3) ^ (amax < 0)
    return jnp.where(nan, _ieee.NAN, factor | jnp.where(negative, _ieee.SIGN, 0))


def _times(codes: jax.Array, factor: jax.Array, format: Format) -> jax.Array:
    """Returns the bits of `code * factor`. `factor` may be signed, infinite or NaN."""
    element = ELEMENTS[format.element]
    significand, exponent = _minifloat.split(codes, element)
    magnitude = factor & _ieee.MAGNITUDE
    factor_significand, factor_exponent = _ieee.split(jnp.minimum(magnitude, _ieee.MAX))
    finite = _ieee.round_to_float32(significand * factor_significand, exponent + factor_exponent)
    infinite = _minifloat.is_infinite(codes, element) | (magnitude == _ieee.INFINITY)
    nan = _minifloat.is_nan(codes, element) | (magnitude > _ieee.INFINITY)
    nan |= infinite & ((significand == 0) | (magnitude == 0))
    negative = _minifloat.is_negative(codes, element) ^ (factor < 0)
    bits = jnp.where(infinite, _ieee.INFINITY, finite) | jnp.where(negative, _ieee.SIGN, 0)
    return jnp.where(nan, _ieee.NAN, bits)
