"""The matmul of a dense layer in FP8 with delayed scaling: forward, dgrad and wgrad."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float, Float32

from ..formats import FP8_E4M3, Format, QuantizedArray
from ._amax import multi_amax
from ._linear_fp8 import fp8_transposed, fp8_values
from ._operand import rows_of, tensor_unit
from ._quantize import quantize
from ._slot import SlottedWeight, refuse_second_derivative


def linear_fp8_delayed(
    x: Float[jax.Array, "*rows features_in"],
    weight: SlottedWeight,
    amaxes: Float32[jax.Array, " 2"],
    slot: jax.Array,
    gradients: Format,
) -> Float[jax.Array, "*rows features_out"]:
    """Returns `x @ weight.T` of operands rounded to FP8 with scales that are known in advance.

    Products are those of `linear_fp8`, except that a scale is a float32 number instead of a power of two. So codes are
    multiplied as they are, and the sum in float32 is multiplied by both scales and then rounded to the dtype of `x`.
    Values above the amax that sets their scale saturate.

    Args:
        x: `(..., features_in)`, bfloat16, float16, float32, or float64, which is rounded to float32 first.
        weight: the codes in which the weight `(features_out, features_in)` was sent (E4M3, row-wise), with the amax
            that set their scale; and a slot for its gradient.
        amaxes: the amaxes that set the scales of `x` and of the incoming gradient.
        slot: an array `(2,)` whose gradient is the amax of `x` and that of the incoming gradient, on this rank: their
            largest finite magnitudes. Its values are never read. Let it have a dtype in which the sum of two gradients
            is their maximum (Flax's `fm32`), so that two calls give the amaxes of both.
        gradients: the format of the incoming gradient, `FP8_E5M2` or `FP8_E4M3`.

    Returns:
        `(..., features_out)`, of the same dtype.
    """
    return _linear(x, weight.values, weight.slot, amaxes, slot, gradients, weight.slot.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _linear(
    x: jax.Array,
    weight: QuantizedArray,
    weight_slot: jax.Array,
    amaxes: jax.Array,
    slot: jax.Array,
    gradients: Format,
    dtype: np.dtype,
) -> jax.Array:
    return _forward(x, weight, weight_slot, amaxes, slot, gradients, dtype)[0]


def _forward(
    x: jax.Array,
    weight: QuantizedArray,
    weight_slot: jax.Array,
    amaxes: jax.Array,
    slot: jax.Array,
    gradients: Format,
    dtype: np.dtype,
):
    del weight_slot, gradients, dtype
    now, kernel = refuse_second_derivative("linear_fp8_delayed", (x, weight))
    y = _product(quantize(rows_of(now), FP8_E4M3, amax=amaxes[0]), kernel, x.dtype, x.dtype)
    return jnp.reshape(y, (*x.shape[:-1], y.shape[-1])), (x, weight, amaxes, slot)


def _backward(gradients: Format, dtype: np.dtype, saved, gradient: jax.Array):
    x, weight, amaxes, slot, gradient = refuse_second_derivative("linear_fp8_delayed", (*saved, gradient))
    rows, tokens = rows_of(gradient), rows_of(x)
    along_out, along_tokens = quantize(rows, gradients, amax=(amaxes[1], amaxes[1]), axis="both")
    x_tokens = quantize(tokens, FP8_E4M3, amax=amaxes[0], axis="column")
    to_x = _product(along_out, fp8_transposed(weight), x.dtype, x.dtype)
    to_weight = _product(along_tokens, x_tokens, x.dtype, dtype)
    # of the input too only here, where it is read anyway
    seen = lax.convert_element_type(_over_all(multi_amax([tokens, rows])), slot.dtype)
    return jnp.reshape(to_x, x.shape), None, to_weight, None, seen


_linear.defvjp(_forward, _backward)


@jax.custom_batching.custom_vmap
def _over_all(amaxes: jax.Array) -> jax.Array:
    """Returns amaxes unchanged. Under `vmap`, returns their maximum over all indices, where JAX would add gradients."""
    return amaxes


@_over_all.def_vmap
def _(size: int, batched: list[bool], amaxes: jax.Array) -> tuple[jax.Array, bool]:
    del size
    return (_over_all(jnp.max(amaxes, axis=0)) if batched[0] else amaxes), False


def _product(a: QuantizedArray, b: QuantizedArray, dtype: jax.typing.DTypeLike, out: jax.typing.DTypeLike) -> jax.Array:
    """Returns `a @ b.T` in the dtype `out`, for codes that both have the contraction last, multiplied as `dtype`."""
    sums = jnp.promote_types(dtype, jnp.float32)
    operands = fp8_values(a).astype(dtype), fp8_values(b).astype(dtype)
    product = lax.dot_general(*operands, (((1,), (1,)), ((), ())), preferred_element_type=sums)
    # one scale after the other, because the product of both may be no float32 number
    return (product * tensor_unit(a) * tensor_unit(b)).astype(out)
