"""The matmul of a dense layer in FP8 with delayed scaling: forward, dgrad and wgrad."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float, Float32

from ...formats import FP8_E4M3, Format, QuantizedArray
from ...mesh import supports_fp8_matmul
from .._operand import rows_of, tensor_unit
from .._quantize import multi_amax, quantize
from .._slot import SlottedWeight, refuse_second_derivative
from ._fp8 import fp8_codes_and_slot, fp8_product, fp8_transposed, fp8_values

# XLA makes calls of cuBLASLt from all products whose dimensions are at least this large. It may compute smaller ones by
# kernels of its own (`xla_gpu_gemm_rewrite_size_threshold`).
_REWRITTEN = 128


def linear_fp8_delayed(
    x: Float[jax.Array, "*rows features_in"],
    weight: Float[jax.Array, "features_out features_in"] | SlottedWeight,
    amaxes: Float32[jax.Array, " 3"],
    slot: jax.Array,
    gradients: Format,
) -> Float[jax.Array, "*rows features_out"]:
    """Returns `x @ weight.T` of operands rounded to FP8 with scales that are known in advance.

    Products are those of `linear_fp8`, except that a scale is a float32 number instead of a power of two. So codes are
    multiplied as they are, and the sum in float32 is multiplied by both scales and then rounded to the dtype of `x`.
    Values above the amax that sets their scale saturate.

    Args:
        x: `(..., features_in)`, bfloat16, float16, float32, or float64, which is rounded to float32 first.
        weight: `(features_out, features_in)`, of the same dtype. With a slot, it can also be the codes in which the
            weight was sent (E4M3, row-wise), with the amax that set their scale.
        amaxes: the amaxes that set the scales of `x`, of a weight that is not codes, and of the incoming gradient.
        slot: an array `(2,)` whose gradient is the amax of `x` and that of the incoming gradient, on this rank: their
            largest finite magnitudes. Its values are never read. Let it have a dtype in which the sum of two gradients
            is their maximum (Flax's `fm32`), so that two calls give the amaxes of both.
        gradients: the format of the incoming gradient, `FP8_E5M2` or `FP8_E4M3`.

    Returns:
        `(..., features_out)`, of the same dtype.
    """
    codes, of_weight = fp8_codes_and_slot(weight, amaxes[1])
    return _linear(x, codes, of_weight, amaxes[::2], slot, gradients, of_weight.dtype)


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
    rows, of_gradient = _with_amax(rows_of(gradient))
    tokens, of_input = _with_amax(rows_of(x))  # computed here and not in forward, because the input is read here anyway
    along_out, along_tokens = quantize(rows, gradients, amax=(amaxes[1], amaxes[1]), axis="both")
    x_tokens = quantize(tokens, FP8_E4M3, amax=amaxes[0], axis="column")
    to_x = _product(along_out, fp8_transposed(weight), x.dtype, x.dtype)
    to_weight = _product(along_tokens, x_tokens, x.dtype, dtype)
    seen = lax.convert_element_type(_over_all(jnp.stack([of_input, of_gradient])), slot.dtype)
    return jnp.reshape(to_x, x.shape), None, to_weight, None, seen


_linear.defvjp(_forward, _backward)


def _with_amax(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns an operand unchanged, and its amax, which is computed before the operand is used. Otherwise XLA would
    compute the amax at the end of the pass, where it is needed, and keep the operand until then."""
    return lax.optimization_barrier((rows, multi_amax([rows])[0]))


@jax.custom_batching.custom_vmap
def _over_all(amaxes: jax.Array) -> jax.Array:
    """Returns amaxes unchanged. Under `vmap`, returns their maximum over all indices, where JAX would add gradients."""
    return amaxes


@_over_all.def_vmap
def _(size: int, batched: list[bool], amaxes: jax.Array) -> tuple[jax.Array, bool]:
    del size
    return (_over_all(jnp.max(amaxes, axis=0)) if batched[0] else amaxes), False


def _product(a: QuantizedArray, b: QuantizedArray, dtype: jax.typing.DTypeLike, out: jax.typing.DTypeLike) -> jax.Array:
    """Returns `a @ b.T` in the dtype `out`, for codes that both have the contraction last, multiplied as `dtype`.

    On GPUs with FP8 matmuls, XLA makes one call of cuBLASLt from the product that `fp8_product` writes. The call takes
    both scales in float32 and writes the result in `out`. `fp8_product` casts the scales to `dtype`, and the call casts
    them back; XLA removes both casts, unless its option `xla_allow_excess_precision` is set to false. Elsewhere the
    cast would round the scales, so they multiply the sums.
    """
    if supports_fp8_matmul() and dtype in (jnp.bfloat16, jnp.float32) and min(*a.matrix, *b.matrix) >= _REWRITTEN:
        return fp8_product(a, b, dtype, out)
    sums = jnp.promote_types(dtype, jnp.float32)
    operands = fp8_values(a).astype(dtype), fp8_values(b).astype(dtype)
    product = lax.dot_general(*operands, (((1,), (1,)), ((), ())), preferred_element_type=sums)
    # one scale after the other, because the product of both may be no float32 number
    return (product * tensor_unit(a) * tensor_unit(b)).astype(out)
