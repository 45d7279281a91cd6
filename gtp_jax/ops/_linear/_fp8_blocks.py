"""The matmul of a dense layer in FP8 with blocks of 128: forward, dgrad and wgrad."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float

from ...formats import FP8_BLOCKS, FP8_BLOCKS_1D, QuantizedArray
from .._implementation import Implementation
from .._operand import quantizable, rows_of
from .._order import Order, by_kernels, by_parts, in_whole_tiles
from .._quantize import blocked_product, quantize_blocked, transposed
from .._slot import SlottedWeight, refuse_second_derivative


def linear_fp8_blocks(
    x: Float[jax.Array, "*rows features_in"],
    weight: Float[jax.Array, "features_out features_in"] | SlottedWeight,
    order: Order | None = None,
    *,
    implementation: Implementation | None = None,
) -> Float[jax.Array, "*rows features_out"]:
    """Returns `x @ weight.T` of operands rounded to E4M3 in blocks of 128, as DeepSeek-V3 was trained (arXiv
    2412.19437).

    | product | operands, and their blocks |
    |---|---|
    | forward | input in 1 x 128 along features in; weight in 128 x 128 |
    | dgrad | gradient in 1 x 128 along features out; the same codes of the weight, transposed |
    | wgrad | gradient and input in 1 x 128 along tokens, each rounded from the values |

    Scales that are made here are powers of two, rounded down, so that nothing saturates. Sums are promoted to float32
    every 128 elements; see `blocked_product`. On Hopper, cuBLASLt multiplies the codes. Elsewhere, their values are
    multiplied in at least float32, which serves to study numerics, not speed.

    Args:
        x: `(..., features_in)`, bfloat16, float16, float32, or float64, which is rounded to float32 first.
        weight: `(features_out, features_in)`, of the same dtype, which is quantized here. With a slot, it is the codes
            in which the weight was sent (`FP8_BLOCKS`, row-wise), or values.
        order: the order of the rows of codes of several kernels; `None` if tiles begin at every 128th row.
        implementation: as in `blocked_product`.

    Returns:
        `(..., features_out)`, of the same dtype. `x` is saved for backward.

    Raises:
        NotImplementedError: as in `blocked_product`.
    """
    codes, slot = weight if isinstance(weight, SlottedWeight) else (weight, weight)
    if not isinstance(codes, QuantizedArray):
        (codes,) = quantize_blocked(quantizable(lax.stop_gradient(codes)), FP8_BLOCKS, "row")
    return _linear(x, codes, slot, order or Order((codes.shape[0],)), implementation, slot.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _linear(
    x: jax.Array,
    weight: QuantizedArray,
    slot: jax.Array,
    order: Order,
    implementation: Implementation | None,
    dtype: np.dtype,
) -> jax.Array:
    return _forward(x, weight, slot, order, implementation, dtype)[0]


def _forward(
    x: jax.Array,
    weight: QuantizedArray,
    slot: jax.Array,
    order: Order,
    implementation: Implementation | None,
    dtype: np.dtype,
):
    del dtype
    now, kernels, _ = refuse_second_derivative("linear_fp8_blocks", (x, weight, slot))
    (rows,) = quantize_blocked(rows_of(now), FP8_BLOCKS_1D, "row")
    y = blocked_product(rows, in_whole_tiles(kernels, order), x.dtype, implementation)
    y = by_parts(y, order)
    return jnp.reshape(y, (*x.shape[:-1], y.shape[-1])), (x, weight)


def _backward(order: Order, implementation: Implementation | None, dtype: np.dtype, saved, gradient: jax.Array):
    x, weight, gradient = refuse_second_derivative("linear_fp8_blocks", (*saved, gradient))
    rows = rows_of(gradient)
    if order.ranks == 1 and not order.cuts:
        along_out, along_tokens = quantize_blocked(rows, FP8_BLOCKS_1D, "both")
    else:
        (along_out,) = quantize_blocked(by_kernels(rows, order), FP8_BLOCKS_1D, "row")
        (along_tokens,) = quantize_blocked(rows, FP8_BLOCKS_1D, "column")
    (x_tokens,) = quantize_blocked(rows_of(x), FP8_BLOCKS_1D, "column")
    to_x = blocked_product(along_out, transposed(in_whole_tiles(weight, order)), x.dtype, implementation)
    to_weight = blocked_product(along_tokens, x_tokens, dtype, implementation)
    return jnp.reshape(to_x, x.shape), None, to_weight


_linear.defvjp(_forward, _backward)
