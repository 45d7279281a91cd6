"""Quantization, written for readability: the formulas of `gtp_jax/formats/README.md`, on whole arrays."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from ...formats import ELEMENTS, RUN, Format
from . import _ieee
from ._amax import any_non_finite, finite_amax
from ._blocks import from_blocks, over_blocks, over_matrices, pack_nibbles, to_blocks
from ._hadamard import hadamard as transform
from ._minifloat import NAN_CODE, encode, split, with_sign
from ._philox import random_bytes

_NO_BYTES = (0,)


# traced once for all pieces of the same shape, of which a layer of experts has many
@functools.partial(jax.jit, static_argnames=("format", "hadamard", "stochastic", "rows", "columns"), inline=True)
def quantize(
    x: jax.Array,
    amax: jax.Array,
    amax_columns: jax.Array,
    key: jax.Array,
    *,
    format: Format,
    hadamard: bool,
    stochastic: bool,
    rows: bool,
    columns: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns the row codes, row scales, column codes and column scales. Those that are not requested, and scales that
    the format does not have, have the shape `(0,)`."""
    copies = []
    if rows:
        copies.append(_copy(_ieee.widen(x), amax, key if stochastic else None, 0, format))
    else:
        copies.append((None, None))
    if columns:
        bits = _ieee.widen(transform(x) if hadamard else x)
        copy = _copy(jnp.swapaxes(bits, -1, -2), amax_columns, key if stochastic else None, 1, format)
        if not format.transposed_columns:
            copy = tuple(None if array is None else jnp.swapaxes(array, -1, -2) for array in copy)
        copies.append(copy)
    else:
        copies.append((None, None))
    row, column = ((_bytes(codes), _bytes(scales)) for codes, scales in copies)
    return *row, *column


def _bytes(array: jax.Array | None) -> jax.Array:
    return jnp.zeros(_NO_BYTES, jnp.uint8) if array is None else array.astype(jnp.uint8)


def _copy(
    bits: jax.Array, amax: jax.Array, key: jax.Array | None, copy: int, format: Format
) -> tuple[jax.Array, jax.Array | None]:
    # blocks run along the last dimension of `bits`
    element = ELEMENTS[format.element]
    if format.block is None:
        factor = over_matrices(_whole_scale(_ieee.as_bits(amax), format), bits.ndim)
        code = with_sign(encode(_ieee.scaled(_finite(bits), factor), element), bits, element)
        return jnp.where(_non_finite(bits), NAN_CODE, code), None

    blocks = to_blocks(bits, format.block)
    within = (-3, -1)
    poisoned = any_non_finite(blocks, within)
    block_amax = finite_amax(blocks, within)
    if format.scale == "e4m3":
        scales, factor = _e4m3_scales(block_amax, _ieee.as_bits(amax), format)
    else:
        scales, factor = _e8m0_scales(block_amax, element.max)
    product = _ieee.scaled(_finite(blocks), over_blocks(factor))
    if key is None:
        code = encode(product, element)
    else:
        runs = (*bits.shape[:-1], -(-bits.shape[-1] // RUN))
        octets = jnp.reshape(random_bytes(runs, key, copy), (*runs[:-1], runs[-1] * RUN))
        code = _round_stochastically(product, to_blocks(octets, format.block))
    codes = jnp.where(over_blocks(poisoned), 0, with_sign(code, blocks, element))
    codes = from_blocks(codes, bits.shape[-2:])
    nan_scale = NAN_CODE if format.scale == "e4m3" else 0xFF
    return pack_nibbles(codes) if format.element_bits == 4 else codes, jnp.where(poisoned, nan_scale, scales)


def _non_finite(bits: jax.Array) -> jax.Array:
    return (bits & _ieee.MAGNITUDE) >= _ieee.INFINITY


def _finite(bits: jax.Array) -> jax.Array:
    return jnp.where(_non_finite(bits), 0, bits & _ieee.MAGNITUDE)


def _whole_scale(amax: jax.Array, format: Format) -> jax.Array:
    """Returns the bits of the factor that maps the tensor's amax to the format's largest number; 1 if the amax is not
    positive and finite."""
    usable = (amax > 0) & (amax < _ieee.INFINITY)
    scale = _ieee.divide(jnp.full_like(amax, _ieee.constant(format.largest)), jnp.where(usable, amax, _ieee.ONE))
    return jnp.where(usable, jnp.minimum(scale, _ieee.MAX), _ieee.ONE)


def _e4m3_scales(block_amax: jax.Array, amax: jax.Array, format: Format) -> tuple[jax.Array, jax.Array]:
    """Returns the codes of the block scales, and the bits of the factors that multiply the elements."""
    e4m3 = ELEMENTS["e4m3"]
    whole = _whole_scale(amax, format)
    whole_inverse = _ieee.divide(jnp.full_like(whole, _ieee.ONE), whole)
    # the association matters to the last bit: a * (S * (1/6))
    per_step = _ieee.multiply(whole, jnp.full_like(whole, _ieee.constant(1 / format.element_max)))
    codes = encode(jnp.minimum(_ieee.multiply(block_amax, over_matrices(per_step, block_amax.ndim)), _ieee.MAX), e4m3)
    significand, exponent = split(codes, e4m3)
    inverse_significand, inverse_exponent = _ieee.split(over_matrices(whole_inverse, block_amax.ndim))
    decoded = _ieee.round_to_float32(significand * inverse_significand, exponent + inverse_exponent)
    return codes, jnp.minimum(_ieee.divide(jnp.full_like(decoded, _ieee.ONE), decoded), _ieee.MAX)


def _e8m0_scales(block_amax: jax.Array, element_max: float) -> tuple[jax.Array, jax.Array]:
    """Returns the biased exponents of the block scales, and the bits of the factors that multiply the elements."""
    value = _ieee.multiply(block_amax, jnp.full_like(block_amax, _ieee.constant(1 / element_max)))
    field, fraction = value >> 23, value & 0x7FFFFF
    up = jnp.where(field == 0, fraction > 0x400000, fraction > 0)
    exponent = jnp.minimum(field + up, 254)
    # 2**(127 - E) is subnormal for E = 254
    return exponent, jnp.where(exponent == 254, 0x00400000, (254 - exponent) << 23)


def _round_stochastically(product: jax.Array, octets: jax.Array) -> jax.Array:
    """Returns the code of the grid point below or above `product`, the nearer one more often: the floor after a random
    shift."""
    m = jnp.minimum(_ieee.as_float(product), 6.0)
    steps_per_unit = jnp.where(m < 2, 2.0, jnp.where(m < 4, 1.0, 0.5))
    up = jnp.floor(m * steps_per_unit + (octets.astype(jnp.float32) + 0.5) * (1 / 256)).astype(jnp.int32)
    # codes 0 to 4 are multiples of 1/2 up to 2, followed by 3, 4 and 6
    return up + jnp.where(m < 2, 0, jnp.where(m < 4, 2, 4))
