"""Float32 arithmetic that conforms exactly to IEEE 754 on every platform of XLA.

XLA's float arithmetic is not sufficient for bit-exact formats: on CPUs it treats subnormals as zero, and on GPUs its
division is off by up to 2 ulp. So a float32 is represented here by its bit pattern, an int32, and

    x = significand * 2**exponent,    0 <= significand < 2**24,

where the significand is an exact integer. Products and quotients are computed in integers and rounded once, by
`round_to_float32`. Float operations are still used where they are correct however XLA treats subnormals, as in the
conversion of integers to float32, and to estimate a quotient, which is then corrected.

Functions on scales (`multiply`, `divide`) take magnitudes, which are bit patterns with the sign bit clear. They cost
about thirty integer operations, which is little for one scale per block. Elements are multiplied by `scaled`, which
uses a float multiplication.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

MAGNITUDE = np.int32(0x7FFFFFFF)
SIGN = np.int32(-(2**31))
INFINITY = np.int32(0x7F800000)
MAX = np.int32(0x7F7FFFFF)
NAN = np.int32(0x7FC00000)
ONE = np.int32(0x3F800000)

_FRACTION = np.int32(0x007FFFFF)
_HIDDEN = np.int32(0x00800000)


def constant(value: float) -> np.int32:
    """Returns the bits of a float32 constant."""
    return np.float32(value).view(np.int32)


def as_bits(x: jax.Array) -> jax.Array:
    """Returns the bit pattern of a float32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def as_float(bits: jax.Array | np.int32) -> jax.Array:
    """Returns the float32 with this bit pattern."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def widen(x: jax.Array) -> jax.Array:
    """Returns the bits of a float32, bfloat16 or float16 array, widened exactly to float32."""
    if x.dtype == jnp.float32:
        return as_bits(x)
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.int32)
    if x.dtype == jnp.bfloat16:
        return bits << 16
    magnitude = bits & 0x7FFF
    # a float16 subnormal is a normal float32: its fraction times 2**-24
    subnormal = as_bits(magnitude.astype(jnp.float32)) - (24 << 23)
    normal = (magnitude << 13) + ((127 - 15) << 23)
    special = INFINITY | (magnitude << 13)
    wide = jnp.where(magnitude < 0x0400, jnp.where(magnitude == 0, 0, subnormal), normal)
    return jnp.where(magnitude >= 0x7C00, special, wide) | (bits & 0x8000) << 16


def narrow(bits: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds float32 bits to nearest even, and returns them as a float32, bfloat16 or float16 array. Every NaN becomes
    the canonical NaN."""
    bits = jnp.where((bits & MAGNITUDE) > INFINITY, NAN, bits)
    if dtype == jnp.float32:
        return as_float(bits)
    sign = (bits & SIGN) >> 16 & 0x8000
    if dtype == jnp.bfloat16:
        # bfloat16 has the exponents of float32, so one rule serves normal and subnormal numbers; NAN remains a NaN
        rounded = round_off(bits & MAGNITUDE, 16)
    else:
        rounded = jnp.minimum(shorten(bits & MAGNITUDE, mantissa_bits=10, min_exponent=-14), 0x7C00)
        rounded = jnp.where((bits & MAGNITUDE) > INFINITY, 0x7E00, rounded)
    return lax.bitcast_convert_type((rounded | sign).astype(jnp.uint16), dtype)


def round_off(n: jax.Array, bits: jax.Array | int) -> jax.Array:
    """Returns `n / 2**bits` rounded to nearest even, for non-negative integers `n` and `bits` of at least 1."""
    return n + (1 << bits - 1) - 1 + (n >> bits & 1) >> bits


def shorten(magnitude: jax.Array, *, mantissa_bits: int, min_exponent: int) -> jax.Array:
    """Rounds a float32 magnitude to a shorter float with the given mantissa and smallest normal exponent, and returns
    its bits.

    Exponents have no upper bound; the caller must clip.
    """
    normal = round_off(magnitude, 23 - mantissa_bits) - (126 + min_exponent << mantissa_bits)
    # to round a subnormal, add a power of two whose last place is the spacing of the subnormals
    base = constant(2.0 ** (23 + min_exponent - mantissa_bits))
    subnormal = as_bits(as_float(magnitude) + as_float(base)) - base
    return jnp.where(magnitude < 127 + min_exponent << 23, subnormal, normal)


def split(magnitude: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the significand and the exponent of a finite magnitude. The significand has exactly 24 bits, unless it is
    0."""
    field, fraction = magnitude >> 23, magnitude & _FRACTION
    significand = jnp.where(field == 0, fraction, fraction | _HIDDEN)
    shift = lax.clz(significand) - 8
    return significand << shift, jnp.maximum(field, 1) - 150 - shift


def round_to_float32(n: jax.Array, exponent: jax.Array) -> jax.Array:
    """Returns the magnitude of `n * 2**exponent`, rounded once to nearest even; Infinity beyond the largest float32.

    Args:
        n: integers from 0 to 2**28. If the lowest bit is a sticky bit for bits that were cut off, n must have at least
            26 bits.
        exponent: integers.
    """
    pattern = as_bits(n.astype(jnp.float32))  # exact or rounded once: all of these are normal, or 0
    field = (pattern >> 23) + exponent
    normal = pattern + (exponent << 23)
    right = jnp.clip(-149 - exponent, 0, 30)
    subnormal = jnp.where(right == 0, n << jnp.clip(exponent + 149, 0, 30), round_off(n, jnp.maximum(right, 1)))
    finite = jnp.where(field >= 1, jnp.where(field >= 255, INFINITY, normal), subnormal)
    return jnp.where(n == 0, 0, finite)


def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns `a * b` of finite magnitudes."""
    (a, a_exponent), (b, b_exponent) = split(a), split(b)
    # a 24 x 24 bit product from halves of 12 bits, because there is no wider integer
    a_high, a_low, b_high, b_low = a >> 12, a & 0xFFF, b >> 12, b & 0xFFF
    middle = a_high * b_low + a_low * b_high
    low = ((middle & 0xFFF) << 12) + a_low * b_low
    high = a_high * b_high + (middle >> 12) + (low >> 24)
    kept = high << 4 | (low >> 20 & 0xF) | ((low & 0xFFFFF) != 0)
    return round_to_float32(kept, a_exponent + b_exponent + 20)


def divide(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns `a / b` of finite magnitudes; Infinity if b is 0.

    A float division, even if inexact, gives the quotient up to a few units. The remainder is small enough to be exact
    in wrapping 32-bit integers, and determines the correction.
    """
    (p, p_exponent), (d, d_exponent) = split(a), split(b)
    divisor = jnp.maximum(d, 1)
    quotient = (p.astype(jnp.float32) / divisor.astype(jnp.float32) * 2.0**25).astype(jnp.int32)
    remainder = (p << 25) - quotient * divisor
    correction = lax.div(remainder + (divisor << 6), divisor) - 64  # rounded down, because the dividend is positive
    inexact = remainder - correction * divisor != 0
    bits = round_to_float32(quotient + correction << 1 | inexact, p_exponent - d_exponent - 26)
    return jnp.where(d == 0, INFINITY, bits)


def scaled(magnitude: jax.Array, factor: jax.Array) -> jax.Array:
    """Returns `magnitude * factor` of finite magnitudes by a cheap method that is exact enough for a quantizer.

    A product below the normal numbers becomes 0, and one above the largest number becomes the largest number. Neither
    changes a code.
    """
    (x, x_exponent), (f, f_exponent) = _mantissa(magnitude), _mantissa(factor)
    product = as_bits(x * f)
    exponent = x_exponent + f_exponent
    field = (product >> 23) + exponent
    bits = jnp.where(field >= 255, MAX, product + (exponent << 23))
    return jnp.where((field <= 0) | (product == 0), 0, bits)


def _mantissa(magnitude: jax.Array) -> tuple[jax.Array, jax.Array]:
    # the mantissa as a normal float: in [1, 2) for a normal number, an integer for a subnormal one
    is_normal = magnitude >= _HIDDEN
    mantissa = jnp.where(is_normal, as_float(magnitude & _FRACTION | ONE), magnitude.astype(jnp.float32))
    return mantissa, jnp.where(is_normal, (magnitude >> 23) - 127, -149)


def add(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns `a + b` of any float32 bit patterns, including signs.

    If both magnitudes are below 2**-100, they are multiplied by 2**64 before they are added, and the exact sum is
    divided by it. Otherwise, a subnormal operand is too small to matter, and the result, if not 0, is normal.
    """
    tiny = jnp.maximum(a & MAGNITUDE, b & MAGNITUDE) < constant(2.0**-100)
    plain = as_bits(as_float(a) + as_float(b))
    lifted = as_bits(as_float(_lift(a)) + as_float(_lift(b)))
    return jnp.where(tiny, _lower(lifted), plain)


def _lift(bits: jax.Array) -> jax.Array:
    magnitude = bits & MAGNITUDE
    subnormal = as_bits(magnitude.astype(jnp.float32)) - (149 - 64 << 23)
    subnormal = jnp.where(magnitude == 0, 0, subnormal)
    return jnp.where(magnitude < _HIDDEN, subnormal, magnitude + (64 << 23)) | bits & SIGN


def _lower(bits: jax.Array) -> jax.Array:
    magnitude = bits & MAGNITUDE
    normal = magnitude - (64 << 23)
    # the lifted sum is 2**64 times a multiple of 2**-149, so this count is a whole number
    scale_up = jnp.where(magnitude == 0, 0, magnitude + (149 - 64 << 23))
    subnormal = as_float(scale_up).astype(jnp.int32)
    return jnp.where(normal < _HIDDEN, subnormal, normal) | bits & SIGN
