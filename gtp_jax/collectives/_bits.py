"""Sends 16-bit floating-point numbers as integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# XLA's CPU backend widens 16-bit floats in collectives; as integers they keep their true size on every backend.
WIRE = {np.dtype(jnp.bfloat16): jnp.uint16, np.dtype(jnp.float16): jnp.uint16}


def in_bits(move: Callable[..., jax.Array], x: jax.Array, *others: Any) -> jax.Array:
    """Returns `move(x, *others)`, with 16-bit floats sent as integers; see `WIRE`.

    Integers have no derivative. If a gradient is differentiated again, the tangent of `x` is sent in float32.

    Args:
        move: a function that is linear in `x`, for any dtype: collectives, and selections of elements.
        x: the array that is sent.
        others: pytrees of integers.
    """
    wire, dtype = WIRE.get(x.dtype), x.dtype
    if wire is None:
        return move(x, *others)

    @jax.custom_jvp
    def moved(x: jax.Array, others: Any) -> jax.Array:
        return lax.bitcast_convert_type(move(lax.bitcast_convert_type(x, wire), *others), dtype)

    @moved.defjvp
    def _(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
        wide = tangents[0].astype(jnp.float32)
        return moved(*primals), move(wide, *primals[1]).astype(dtype)

    return moved(x, others)
