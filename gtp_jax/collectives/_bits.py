"""Sends 16-bit floating-point numbers as integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# XLA's CPU backend widens 16-bit floats in collectives; as integers they keep their true size on every backend.
_BITS = {np.dtype(jnp.bfloat16): jnp.uint16, np.dtype(jnp.float16): jnp.uint16}


def moved_in_bits(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Returns `move(x)`, with 16-bit floats moved as integers, through which no gradient flows."""
    bits = _BITS.get(x.dtype)
    if bits is None:
        return move(x)
    return lax.bitcast_convert_type(move(lax.bitcast_convert_type(x, bits)), x.dtype)


def in_bits(move: Callable[..., jax.Array], x: jax.Array, *others: Any) -> jax.Array:
    """Returns `move(x, *others)`, with 16-bit floats sent as integers.

    Integers have no derivative, so this function has a rule of its own: the tangent of `x` is sent in float32. Inside
    a `custom_vjp`, this happens only if a gradient is differentiated again.

    Args:
        move: a function that is linear in `x`, for any dtype: collectives, and selections of elements.
        x: the array that is sent.
        others: pytrees of integers.
    """
    dtype = x.dtype
    if dtype not in _BITS:
        return move(x, *others)

    @jax.custom_jvp
    def moved(x: jax.Array, others: Any) -> jax.Array:
        return moved_in_bits(lambda x: move(x, *others), x)

    @moved.defjvp
    def _(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
        wide = tangents[0].astype(jnp.float32)
        return moved(*primals), move(wide, *primals[1]).astype(dtype)

    return moved(x, others)
