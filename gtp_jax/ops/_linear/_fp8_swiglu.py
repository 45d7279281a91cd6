"""A gated MLP in FP8: both matmuls, with SwiGLU and its gradient quantized where they are computed."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from ...formats import FP8_E4M3, Format, QuantizedArray
from .._operand import operand_amax, rows_of
from .._quantize import multi_amax, power_of_two_amax, quantize_swiglu, quantize_swiglu_gradient, swiglu_amax
from .._save import saves_codes
from .._slot import SlottedWeight, refuse_second_derivative
from ._fp8 import (
    codes_for_wgrad,
    codes_of_gradient,
    codes_of_input,
    fp8_codes_and_slot,
    fp8_product,
    fp8_transposed,
)


class _Options(NamedTuple):
    gradients: Format
    parts: int
    dtypes: tuple[np.dtype, np.dtype]  # of the gradients of `up` and `down`
    keep_codes: bool


def swiglu_fp8(
    x: Float[jax.Array, "*rows features_in"],
    up: Float[jax.Array, "fused features_in"] | SlottedWeight,
    down: Float[jax.Array, "features_out hidden"] | SlottedWeight,
    gradients: Format,
    *,
    parts: int = 1,
    keep_codes: bool | None = None,
) -> Float[jax.Array, "*rows features_out"]:
    """Returns `linear_fp8(swiglu(linear_fp8(x, up), parts), down)`, with the same rounding.

    On GPUs, neither the result of `swiglu` nor the gradient of its operand is stored: kernels compute them for their
    amax, and again for their codes. Backward needs the output of the first matmul, and of `swiglu` only the amax.
    Remat policies that save matmuls save both.

    Args:
        x: `(..., features_in)`, bfloat16, float16 or float32.
        up: the fused weight of gate and up, `(parts * 2 * width, features_in)`; see `swiglu`. Values, or codes as in
            `linear_fp8`.
        down: the weight of the second matmul, `(features_out, parts * width)`, values or codes.
        gradients: the format of the gradients of both outputs, `FP8_E5M2` or `FP8_E4M3`.
        parts: as in `swiglu`.
        keep_codes: whether to save the codes of `x` for backward, as in `linear_fp8`.

    Returns:
        `(..., features_out)`, of the dtype of `x`.
    """
    of_up, up_slot = fp8_codes_and_slot(up)
    of_down, down_slot = fp8_codes_and_slot(down)
    options = _Options(gradients, parts, (up_slot.dtype, down_slot.dtype), saves_codes(keep_codes))
    return _swiglu(x, of_up, of_down, up_slot, down_slot, options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _swiglu(
    x: jax.Array,
    up: QuantizedArray,
    down: QuantizedArray,
    up_slot: jax.Array,
    down_slot: jax.Array,
    options: _Options,
) -> jax.Array:
    # nothing is saved without a backward pass
    return _forward(x, up, down, up_slot, down_slot, options._replace(keep_codes=False))[0]


def _forward(
    x: jax.Array,
    up: QuantizedArray,
    down: QuantizedArray,
    up_slot: jax.Array,
    down_slot: jax.Array,
    options: _Options,
):
    del up_slot, down_slot
    now, of_up, of_down = refuse_second_derivative("swiglu_fp8", (x, up, down))
    amax = operand_amax(multi_amax([rows_of(now)]), FP8_E4M3)[0]
    codes, kept = codes_of_input(now, amax, options.keep_codes)
    gate_up = fp8_product(codes, of_up, x.dtype, x.dtype)
    hidden_amax = operand_amax(swiglu_amax(gate_up, options.parts), FP8_E4M3)
    y = fp8_product(quantize_swiglu(gate_up, hidden_amax, options.parts), of_down, x.dtype, x.dtype)
    saved = (x if kept is None else kept, amax, gate_up, hidden_amax, up, down)
    return jnp.reshape(y, (*x.shape[:-1], y.shape[-1])), saved


def _backward(options: _Options, saved, gradient: jax.Array):
    x, amax, gate_up, hidden_amax, up, down, gradient = refuse_second_derivative("swiglu_fp8", (*saved, gradient))
    (to_up, to_down), dtype = options.dtypes, gradient.dtype
    along_out, along_tokens = codes_of_gradient(gradient, options.gradients)
    of_hidden = fp8_product(along_out, fp8_transposed(down), dtype, dtype)
    gradient_amax = power_of_two_amax(swiglu_amax(gate_up, options.parts, of_hidden), options.gradients)
    hidden, of_rows, of_columns = quantize_swiglu_gradient(
        gate_up, of_hidden, hidden_amax, gradient_amax, options.gradients, options.parts
    )
    of_x = fp8_product(of_rows, fp8_transposed(up), dtype, dtype)
    of_up = fp8_product(of_columns, codes_for_wgrad(x, amax), dtype, to_up)
    of_down = fp8_product(along_tokens, hidden, dtype, to_down)
    return jnp.reshape(of_x, (*gradient.shape[:-1], of_x.shape[-1])), None, None, of_up, of_down


_swiglu.defvjp(_forward, _backward)
