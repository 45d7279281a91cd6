"""The matmul of a dense layer in FP8: forward, and both of backward."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from ..formats import FP8_E4M3, Format, QuantizedArray
from ._amax import multi_amax, power_of_two_amax
from ._operand import operand_amax, quantizable, rows_of, tensor_unit
from ._quantize import quantize

_DTYPES = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def linear_fp8(x: jax.Array, weight: jax.Array, gradients: Format) -> jax.Array:
    """`x @ weight.T` of operands rounded to FP8, each scaled by its own amax; sums in float32.

    Forward multiplies E4M3 by E4M3; backward multiplies the incoming gradient, in `gradients`, by weight and by input
    in E4M3 (per-tensor current scaling; arXiv 2209.05433, and TransformerEngine's recipe of that name). Scales are
    powers of two, so that a weight that travelled in E4M3 scaled by one is not rounded again. The amax of `x` and of
    the gradient is that of this rank's part: products are local, so ranks need not agree on it.

    On Hopper XLA makes each product one FP8 matmul of cuBLASLt, whose operands lie as it needs them, contraction last;
    elsewhere the same numbers are multiplied in the dtype of `x`.

    Args:
        x: `(..., features_in)`, bfloat16, float16, float32, or float64, which is rounded to float32 first.
        weight: `(features_out, features_in)`, of the same dtype.
        gradients: `FP8_E5M2` or `FP8_E4M3`.

    Returns:
        `(..., features_out)`, of the same dtype.
    """
    return _forward(x, weight, gradients)[0]


def _forward(x: jax.Array, weight: jax.Array, gradients: Format):
    del gradients
    rows = rows_of(x)
    amaxes = operand_amax(multi_amax([rows, quantizable(weight)]), FP8_E4M3)
    along_in = quantize(rows, FP8_E4M3, amax=amaxes[0])
    y = _product(along_in, quantize(quantizable(weight), FP8_E4M3, amax=amaxes[1]), x.dtype)
    return jnp.reshape(y, (*x.shape[:-1], y.shape[-1])), (x, weight, amaxes)


def _backward(gradients: Format, saved, gradient: jax.Array):
    x, weight, amaxes = saved
    rows = rows_of(gradient)
    amax = power_of_two_amax(multi_amax([rows])[0], gradients)
    along_out, along_tokens = quantize(rows, gradients, amax=(amax, amax), axis="both")
    # column-wise copies are transposed: (in, out) and (in, tokens)
    weight_in = quantize(quantizable(weight), FP8_E4M3, amax=amaxes[1], axis="column")
    x_in = quantize(rows_of(x), FP8_E4M3, amax=amaxes[0], axis="column")
    to_x = _product(along_out, weight_in, x.dtype)
    to_weight = _product(along_tokens, x_in, weight.dtype)
    return jnp.reshape(to_x, x.shape), to_weight


linear_fp8.defvjp(_forward, _backward)


def _product(a: QuantizedArray, b: QuantizedArray, dtype: jax.typing.DTypeLike) -> jax.Array:
    """`a @ b.T` of codes that both lie with the contraction last."""
    return lax.dot_general(_values(a, dtype), _values(b, dtype), (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def _values(q: QuantizedArray, dtype: jax.typing.DTypeLike) -> jax.Array:
    # the form in which XLA knows an operand of an FP8 matmul: converted, and multiplied by a scalar
    codes = lax.bitcast_convert_type(q.codes, _DTYPES[q.format.element])
    return codes.astype(dtype) * tensor_unit(q).astype(dtype)
