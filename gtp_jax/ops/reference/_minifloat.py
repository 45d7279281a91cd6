"""Encodes float32 bits as short floats, saturated and rounded to nearest even, and splits codes into their fields."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ...formats import Element
from . import _ieee

NAN_CODE = 0x7F


def encode(magnitude: jax.Array, element: Element) -> jax.Array:
    """Returns the code of a finite float32 magnitude, with the sign bit clear."""
    clipped = jnp.minimum(magnitude, _ieee.constant(element.max))
    return _ieee.shorten(clipped, mantissa_bits=element.mantissa_bits, min_exponent=element.min_exponent)


def with_sign(code: jax.Array, bits: jax.Array, element: Element) -> jax.Array:
    """Returns `code` with the sign of the float32 bits from which it was made; 0 keeps its sign too."""
    return code | (bits >> 31 & 1) << element.bits - 1


def split(code: jax.Array, element: Element) -> tuple[jax.Array, jax.Array]:
    """Returns the significand and the exponent of a code's magnitude, `significand * 2**exponent`."""
    field = _magnitude(code, element) >> element.mantissa_bits
    fraction = code & (1 << element.mantissa_bits) - 1
    significand = jnp.where(field == 0, fraction, fraction | 1 << element.mantissa_bits)
    return significand, jnp.maximum(field, 1) - 1 + element.min_exponent - element.mantissa_bits


def is_negative(code: jax.Array, element: Element) -> jax.Array:
    """Returns whether the sign bit is set."""
    return (code >> element.bits - 1 & 1) == 1


def is_nan(code: jax.Array, element: Element) -> jax.Array:
    """Returns whether a code is NaN: no code of e2m1, one code per sign of e4m3, and those of IEEE 754 of e5m2."""
    first = {"e2m1": 0x08, "e4m3": 0x7F, "e5m2": 0x7D}[element.name]
    return _magnitude(code, element) >= first


def is_infinite(code: jax.Array, element: Element) -> jax.Array:
    """Returns whether a code is Infinity, which only e5m2 has."""
    return (_magnitude(code, element) == 0x7C) & (element.name == "e5m2")


def _magnitude(code: jax.Array, element: Element) -> jax.Array:
    return code & (1 << element.bits - 1) - 1
