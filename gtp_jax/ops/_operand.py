"""Operands of quantized matmuls."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Float

from ..formats import Format, Operands, QuantizedArray
from ._quantize import dequantize, multi_amax, power_of_two_amax, quantize
from ._save import save_for_backward


def quantizable(x: Float[jax.Array, "*shape"]) -> Float[jax.Array, "*shape"]:
    """Returns the array in a dtype that can be quantized: float64 is rounded to float32."""
    return x.astype(jnp.float32) if x.dtype == jnp.float64 else x


def rows_of(x: Float[jax.Array, "*rows features"]) -> Float[jax.Array, "tokens features"]:
    """Returns `(..., features)` as a matrix that can be quantized, with one row per token."""
    return quantizable(jnp.reshape(x, (-1, x.shape[-1])))


def operand_amax(amax: jax.Array, format: Format) -> jax.Array:
    """Returns `power_of_two_amax`, and saves it for backward."""
    return save_for_backward(power_of_two_amax(amax, format))


def tensor_unit(q: QuantizedArray) -> jax.Array:
    """Returns the factor of a whole tensor, by which all products of a code and its block scale are multiplied. The
    format must have an amax."""
    assert q.amax is not None
    return jnp.where((q.amax > 0) & jnp.isfinite(q.amax), q.amax / q.format.largest, 1.0)


def values_of(q: QuantizedArray, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns the values of a quantized operand; for float64, the float32 values are cast."""
    return dequantize(q, jnp.float32).astype(dtype) if dtype == jnp.float64 else dequantize(q, dtype)


def rounded_weight(
    weight: jax.Array, operands: Operands, axis: Literal["row", "column"], *, codes: bool = False
) -> QuantizedArray | jax.Array:
    """Quantizes a weight, or a stack of weights, that was already rounded when it was sent, with blocks along the
    contraction of the given axis. Returns the values unchanged if they already have such blocks (or the format has
    none), and codes are not needed."""
    form = operands.weight
    if not codes and (form.block is None or axis == "row" or form.block[0] == form.block[1]):
        return weight
    values = quantizable(weight)
    amax = power_of_two_amax(multi_amax([values])[0], form) if form.has_amax else None
    return quantize(values, form, amax=amax, axis=axis)
