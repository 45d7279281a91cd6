"""Operands of matmuls in formats."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..formats import QuantizedArray


def quantizable(x: jax.Array) -> jax.Array:
    """The array in a dtype that can be quantized: float64 is rounded to float32."""
    return x.astype(jnp.float32) if x.dtype == jnp.float64 else x


def rows_of(x: jax.Array) -> jax.Array:
    """`(..., features)` as a matrix that can be quantized, a row a token."""
    return quantizable(jnp.reshape(x, (-1, x.shape[-1])))


def tensor_unit(q: QuantizedArray) -> jax.Array:
    """What all codes times block scales of a tensor are multiplied with; its format has an amax."""
    assert q.amax is not None
    return jnp.where((q.amax > 0) & jnp.isfinite(q.amax), q.amax / q.format.largest, 1.0)
