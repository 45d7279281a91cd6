"""The matmul of a dense layer in FP8: forward, and both of backward."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..formats import FP8_E4M3, Format, QuantizedArray
from ._amax import multi_amax, power_of_two_amax
from ._operand import operand_amax, quantizable, rows_of, tensor_unit
from ._quantize import quantize

_DTYPES = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


class CodedWeight(NamedTuple):
    """A weight `(features_out, features_in)` as codes, which are integers, and where its gradient goes.

    Attributes:
        codes: in E4M3, row-wise.
        slot: of the weight's shape, in the dtype of the matmul; only its gradient counts, its values are never read.
    """

    codes: QuantizedArray
    slot: jax.Array


def linear_fp8(x: jax.Array, weight: jax.Array | CodedWeight, gradients: Format) -> jax.Array:
    """`x @ weight.T` of operands rounded to FP8, each scaled by its own amax; sums in float32.

    Forward multiplies E4M3 by E4M3; backward multiplies the incoming gradient, in `gradients`, by weight and by input
    in E4M3 (per-tensor current scaling; arXiv 2209.05433, and TransformerEngine's recipe of that name). Scales are
    powers of two. The amax of `x` and of the gradient is that of this rank's part: products are local, so ranks need
    not agree on it.

    On Hopper XLA makes each product one FP8 matmul of cuBLASLt, whose operands lie as it needs them, contraction last;
    elsewhere the same numbers are multiplied in the dtype of `x`.

    Args:
        x: `(..., features_in)`, bfloat16, float16, float32, or float64, which is rounded to float32 first.
        weight: `(features_out, features_in)`, of the same dtype; or the codes in which it travelled, which are
            multiplied as they are.
        gradients: `FP8_E5M2` or `FP8_E4M3`.

    Returns:
        `(..., features_out)`, of the same dtype.
    """
    if not isinstance(weight, CodedWeight):
        values = quantizable(lax.stop_gradient(weight))
        amax = power_of_two_amax(multi_amax([values])[0], FP8_E4M3)
        weight = CodedWeight(quantize(values, FP8_E4M3, amax=amax), weight)
    return _linear(x, weight.codes, weight.slot, gradients)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _linear(x: jax.Array, weight: QuantizedArray, slot: jax.Array, gradients: Format) -> jax.Array:
    return _forward(x, weight, slot, gradients)[0]


def _forward(x: jax.Array, weight: QuantizedArray, slot: jax.Array, gradients: Format):
    del slot, gradients
    rows = rows_of(x)
    amax = operand_amax(multi_amax([rows]), FP8_E4M3)[0]
    y = _product(quantize(rows, FP8_E4M3, amax=amax), weight, x.dtype)
    return jnp.reshape(y, (*x.shape[:-1], y.shape[-1])), (x, weight, amax)


def _backward(gradients: Format, saved, gradient: jax.Array):
    x, weight, amax = saved
    rows = rows_of(gradient)
    gradient_amax = power_of_two_amax(multi_amax([rows])[0], gradients)
    along_out, along_tokens = quantize(rows, gradients, amax=(gradient_amax, gradient_amax), axis="both")
    x_tokens = quantize(rows_of(x), FP8_E4M3, amax=amax, axis="column")
    to_x = _product(along_out, _turned(weight), x.dtype)
    to_weight = _product(along_tokens, x_tokens, x.dtype)
    return jnp.reshape(to_x, x.shape), None, to_weight


_linear.defvjp(_forward, _backward)


def _turned(weight: QuantizedArray) -> QuantizedArray:
    """The same codes with the features out last, as a column-wise copy has them: in a tensor of one scale both copies
    are of the same numbers."""
    return QuantizedArray(weight.codes.T, None, weight.amax, weight.format, weight.matrix, columns=True)


def _product(a: QuantizedArray, b: QuantizedArray, dtype: jax.typing.DTypeLike) -> jax.Array:
    """`a @ b.T` of codes that both lie with the contraction last."""
    return lax.dot_general(_values(a, dtype), _values(b, dtype), (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def _values(q: QuantizedArray, dtype: jax.typing.DTypeLike) -> jax.Array:
    # the form in which XLA knows an operand of an FP8 matmul: converted, and multiplied by a scalar
    codes = lax.bitcast_convert_type(q.codes, _DTYPES[q.format.element])
    return codes.astype(dtype) * tensor_unit(q).astype(dtype)
