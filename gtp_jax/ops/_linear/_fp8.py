"""The matmul of a dense layer in FP8: forward, dgrad and wgrad."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float

from ...formats import FP8_E4M3, Format, QuantizedArray
from .._operand import operand_amax, quantizable, rows_of, tensor_unit
from .._quantize import multi_amax, power_of_two_amax, quantize
from .._save import save_for_backward, saves_codes
from .._slot import SlottedWeight, depends_on
from ._products import Gradient, linear_rounded

_DTYPES = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


def linear_fp8(
    x: Float[jax.Array, "*rows features_in"],
    weight: Float[jax.Array, "features_out features_in"] | SlottedWeight,
    gradients: Format,
    *,
    keep_codes: bool | None = None,
) -> Float[jax.Array, "*rows features_out"]:
    """Returns `x @ weight.T` of operands rounded to FP8, each scaled by its own amax, with sums in float32.

    Forward multiplies E4M3 by E4M3. Backward multiplies the incoming gradient, in `gradients`, by the weight and by the
    input, both in E4M3 (per-tensor current scaling; arXiv 2209.05433, and TransformerEngine's recipe of that name).
    Scales are powers of two. The amax of `x` and of the gradient is that of this rank's part: products are local, so
    ranks need not agree on it.

    On Hopper, XLA turns a large product into one FP8 matmul of cuBLASLt, because the operands have the layout that it
    needs, with the contraction last. Otherwise, the same numbers are multiplied in the dtype of `x`.

    Args:
        x: `(..., features_in)`, bfloat16, float16, float32, or float64, which is rounded to float32 first.
        weight: `(features_out, features_in)`, of the same dtype. With a slot, it can also be the codes in which the
            weight was sent (E4M3, row-wise), which are multiplied directly.
        gradients: the format of the incoming gradient, `FP8_E5M2` or `FP8_E4M3`.
        keep_codes: whether to save the codes of `x` for backward, instead of `x`; see `codes_of_input`. By default, if
            the remat policy in force saves them (`saves_codes`). Results do not change.

    Returns:
        `(..., features_out)`, of the same dtype.
    """
    return linear_rounded(x, weight, Fp8Products(gradients, saves_codes(keep_codes)))


@functools.partial(jax.tree_util.register_dataclass, data_fields=(), meta_fields=("gradients", "keep_codes"))
@dataclasses.dataclass(frozen=True)
class Fp8Products:
    """Rounds operands to FP8, each part by its own amax; see `linear_fp8`.

    Attributes:
        gradients: the format of the incoming gradient.
        keep_codes: whether to save the codes of the input for backward, instead of the input.
    """

    gradients: Format
    keep_codes: bool

    @property
    def name(self) -> str:
        return "linear_fp8"

    def weight_and_slot(self, weight: jax.Array | SlottedWeight) -> tuple[QuantizedArray, jax.Array]:
        return fp8_codes_and_slot(weight)

    def of_inputs(self, parts: Sequence[jax.Array], backward: bool) -> tuple[list[QuantizedArray], list[Any]]:
        amaxes = list(operand_amax(multi_amax([rows_of(x) for x in parts]), FP8_E4M3))
        keep_codes, codes, saved = backward and self.keep_codes, [], []
        for x, amax in zip(parts, amaxes, strict=True):
            own, kept = codes_of_input(x, amax, keep_codes)
            codes.append(own)
            saved.append((x if kept is None else kept, amax))
        return codes, saved

    def for_wgrad(self, saved: tuple[jax.Array | QuantizedArray, jax.Array]) -> QuantizedArray:
        return codes_for_wgrad(*saved)

    def of_gradients(self, parts: Sequence[jax.Array]) -> list[Gradient]:
        rows = [rows_of(part) for part in parts]
        amaxes = power_of_two_amax(multi_amax(rows), self.gradients)
        return [
            quantize(own, self.gradients, amax=(amax, amax), axis="both")
            for own, amax in zip(rows, amaxes, strict=True)
        ]

    def to_send(self, gradient: jax.Array) -> QuantizedArray:
        """Returns the codes of a part of the incoming gradient as a rank sends them, once for both products."""
        rows = rows_of(gradient)
        return quantize(rows, self.gradients, amax=power_of_two_amax(multi_amax([rows])[0], self.gradients))

    def received(self, sent: QuantizedArray) -> Gradient:
        """Returns the codes that `to_send` made, for both products."""
        return sent, fp8_transposed(sent)

    def forward(self, weight: QuantizedArray, dtype: np.dtype) -> Callable[[QuantizedArray], jax.Array]:
        return lambda codes: fp8_product(codes, weight, dtype, dtype)

    def dgrad(self, weight: QuantizedArray, dtype: np.dtype) -> Callable[[QuantizedArray], jax.Array]:
        return self.forward(fp8_transposed(weight), dtype)

    def wgrad(self, gradient: QuantizedArray, x: QuantizedArray, dtype: np.dtype, out: np.dtype) -> jax.Array:
        return fp8_product(gradient, x, dtype, out)


def fp8_codes_and_slot(
    weight: Float[jax.Array, "features_out features_in"] | SlottedWeight, amax: jax.Array | None = None
) -> tuple[QuantizedArray, Float[jax.Array, "features_out features_in"]]:
    """Returns the codes of a weight as products in FP8 multiply them, and the array that receives its gradient. Values
    are quantized here, with the scale that `amax` sets, or, without one, with a power of two that fits the values."""
    codes, slot = weight if isinstance(weight, SlottedWeight) else (weight, weight)
    if not isinstance(codes, QuantizedArray):
        values = quantizable(lax.stop_gradient(codes))
        amax = power_of_two_amax(multi_amax([values])[0], FP8_E4M3) if amax is None else lax.stop_gradient(amax)
        codes = depends_on(quantize(values, FP8_E4M3, amax=amax), slot)
    return codes, slot


def codes_of_input(
    x: Float[jax.Array, "*rows features"], amax: jax.Array, keep_codes: bool
) -> tuple[QuantizedArray, QuantizedArray | None]:
    """Returns the codes of an input along its features, which forward multiplies; and, if `keep_codes`, those along its
    tokens, which wgrad multiplies.

    Both copies are made in one pass over `x`. Remat policies that save matmuls save the second one, 1 byte per element.
    Backward then neither computes `x` again nor quantizes it.

    Args:
        x: the input.
        amax: the amax that sets its scale.
        keep_codes: whether to make the codes of wgrad too.
    """
    rows = rows_of(x)
    if not keep_codes:
        return quantize(rows, FP8_E4M3, amax=amax), None
    along_features, along_tokens = quantize(rows, FP8_E4M3, amax=(amax, amax), axis="both")
    return along_features, save_for_backward(along_tokens)


def codes_for_wgrad(x: jax.Array | QuantizedArray, amax: jax.Array) -> QuantizedArray:
    """Returns the codes of an input along its tokens, given the input or these codes."""
    return x if isinstance(x, QuantizedArray) else quantize(rows_of(x), FP8_E4M3, amax=amax, axis="column")


def codes_of_gradient(
    gradient: Float[jax.Array, "*rows features"], format: Format
) -> tuple[QuantizedArray, QuantizedArray]:
    """Returns the codes of an incoming gradient along its features, which dgrad multiplies, and those along its tokens,
    which wgrad multiplies."""
    rows = rows_of(gradient)
    amax = power_of_two_amax(multi_amax([rows])[0], format)
    return quantize(rows, format, amax=(amax, amax), axis="both")


def fp8_transposed(q: QuantizedArray) -> QuantizedArray:
    """Returns the same codes with the first dimension last, as a column-wise copy has them. A tensor with a single
    scale has the same numbers in both copies."""
    return QuantizedArray(q.codes.T, None, q.amax, q.format, q.matrix, columns=True)


def fp8_product(
    a: QuantizedArray, b: QuantizedArray, dtype: jax.typing.DTypeLike, out: jax.typing.DTypeLike
) -> jax.Array:
    """Returns `a @ b.T` in the dtype `out`, for codes that both have the contraction last, multiplied as `dtype`."""
    return lax.dot_general(_values(a, dtype), _values(b, dtype), (((1,), (1,)), ((), ())), preferred_element_type=out)


def _values(q: QuantizedArray, dtype: jax.typing.DTypeLike) -> jax.Array:
    # XLA recognizes an operand of an FP8 matmul in this form: converted, and multiplied by a scalar
    return fp8_values(q).astype(dtype) * tensor_unit(q).astype(dtype)


def fp8_values(q: QuantizedArray) -> jax.Array:
    """Returns the values of the codes, without the scale of the tensor, in an FP8 dtype."""
    return lax.bitcast_convert_type(q.codes, _DTYPES[q.format.element])
