"""E4M3 in blocks with float32 scales: the formulas of `gtp_jax/formats/README.md`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from ...formats import E4M3
from . import _ieee
from ._blocks import from_blocks, over_blocks, to_blocks
from ._minifloat import NAN_CODE, encode, is_nan, is_negative, split, with_sign


def block_tops(x: jax.Array, block: tuple[int, int]) -> jax.Array:
    """Returns the bits of the largest magnitude of each block, int32 `(*lead, blocks down, blocks across)`. Inf and NaN
    count as larger than any number, so the order is that of integers."""
    return jnp.max(to_blocks(_ieee.widen(x) & _ieee.MAGNITUDE, block), axis=(-3, -1), initial=0)


def power_of_two_scales(tops: jax.Array) -> jax.Array:
    """Returns the bits of each block's scale: 448 / amax, rounded down to a power of two and at most 2**127; 1 if the
    amax is 0, Inf or NaN."""
    # 448 is 1.75 * 2**8; the quotient is infinite for every amax up to 1.75 * 2**-120, subnormals included
    field = 262 - (tops >> 23) - ((tops & 0x007FFFFF) > 0x00600000)
    usable = (tops > 0) & (tops < _ieee.INFINITY)
    return jnp.where(usable, jnp.minimum(field, 254) << 23, _ieee.ONE)


def inverses(scales: jax.Array) -> jax.Array:
    """Returns the inverses of scales, float32, which are subnormal for 2**127."""
    field = 254 - (scales >> 23)
    return _ieee.as_float(jnp.where(field == 0, 0x00400000, field << 23))


def encode_elements(x: jax.Array, scales: jax.Array) -> jax.Array:
    """Returns the uint8 codes of elements, given the bits of their scales, of a shape that broadcasts. The code of an
    element that is not finite is NaN."""
    bits = _ieee.widen(x)
    magnitude = bits & _ieee.MAGNITUDE
    bad = magnitude >= _ieee.INFINITY
    code = with_sign(encode(_ieee.scaled(jnp.where(bad, 0, magnitude), scales), E4M3), bits, E4M3)
    return jnp.where(bad, NAN_CODE, code).astype(jnp.uint8)


@functools.partial(jax.jit, static_argnames=("block",), inline=True)
def quantize_blocked(x: jax.Array, *, block: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """Returns the codes of `(*lead, R, C)`, in its shape, and the inverses of the scales, float32 `(*lead, blocks down,
    blocks across)`."""
    scales = power_of_two_scales(block_tops(x, block))
    codes = encode_elements(to_blocks(x, block), over_blocks(scales))
    return from_blocks(codes, x.shape[-2:]), inverses(scales)


@functools.partial(jax.jit, static_argnames=("block", "dtype"), inline=True)
def decode_blocked(
    codes: jax.Array, inverse_scales: jax.Array, *, block: tuple[int, int], dtype: jnp.dtype
) -> jax.Array:
    """Returns the values of codes `(*lead, R, C)`, in `dtype`, rounded to float32 first. Inverse scales may be any
    finite numbers of at least 0."""
    significand, exponent = split(to_blocks(codes.astype(jnp.int32), block), E4M3)
    scale, scale_exponent = _ieee.split(over_blocks(_ieee.as_bits(inverse_scales)))
    # significands have 4 and 24 bits
    bits = _ieee.round_to_float32(significand * scale, exponent + scale_exponent)
    whole = to_blocks(codes.astype(jnp.int32), block)
    bits = jnp.where(is_nan(whole, E4M3), _ieee.NAN, bits | jnp.where(is_negative(whole, E4M3), _ieee.SIGN, 0))
    return _ieee.narrow(from_blocks(bits, codes.shape[-2:]), dtype)


@functools.partial(jax.jit, static_argnames=("dtype",), inline=True)
def blocked_product(
    left: jax.Array,
    left_scales: jax.Array,
    right: jax.Array,
    right_scales: jax.Array,
    *,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Returns `left @ right.T` of codes. The sum of every 128 elements of the contraction is scaled and added to a
    float32 sum, or to a float64 sum if that is `dtype`.

    Args:
        left: codes `(M, K)`, with inverse scales `(M, ceil(K / 128))`.
        right: codes `(N, K)`, with inverse scales `(N, ceil(K / 128))`, or `(ceil(N / 128), ceil(K / 128))` of tiles.
        dtype: the dtype of the result.
    """
    sums = jnp.promote_types(dtype, jnp.float32)
    if right_scales.shape[0] != right.shape[0]:
        right_scales = jnp.repeat(right_scales, 128, axis=0)[: right.shape[0]]

    def in_runs(codes: jax.Array) -> jax.Array:
        padded = jnp.pad(codes, ((0, 0), (0, -codes.shape[1] % 128)))
        return jnp.moveaxis(jnp.reshape(padded, (len(codes), padded.shape[1] // 128, 128)), 1, 0)

    def values(codes: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(sums)

    def add(total: jax.Array, run: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        a, a_scale, b, b_scale = run
        part = lax.dot_general(values(a), values(b), (((1,), (1,)), ((), ())), preferred_element_type=sums)
        return total + part * a_scale[:, None].astype(sums) * b_scale[None].astype(sums), None

    runs = in_runs(left), left_scales.T, in_runs(right), right_scales.T
    total, _ = lax.scan(add, jnp.zeros((left.shape[0], right.shape[0]), sums), runs)
    return total.astype(dtype)
