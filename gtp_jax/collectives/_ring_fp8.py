"""Overlaps FP8 matmuls with the communication of the sequence over tp: what is gathered travels as codes.

The functions have the order of those in `_ring` [Note: turns], and the products of `gtp_jax.ops.linear_fp8`. A rank
quantizes its own part of the sequence once, by the amax of that part, and sends the codes with the amax. So half the
bytes of bfloat16 travel, and no part is quantized by more than one rank. Sums over ranks travel as values, because the
sum of rounded sums would be rounded again at each rank. Called inside a `shard_map`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from ..formats import FP8_E4M3, Format, QuantizedArray
from ..ops import (
    SlottedWeight,
    as_one,
    fp8_codes_and_slot,
    fp8_product,
    fp8_transposed,
    multi_amax,
    operand_amax,
    power_of_two_amax,
    quantize,
    refuse_second_derivative,
    rows_of,
)
from ._ring import Parts, sum_of_terms, term_dtype, while_gathered, while_scattered


def gather_linear_fp8(
    x: Float[jax.Array, "batch part *inner features_in"],
    weight: Float[jax.Array, "features_out features_in"] | SlottedWeight,
    gradients: Format,
    axis: str,
) -> tuple[Float[jax.Array, "batch part *inner features_out"], ...]:
    """Returns `linear_fp8` of every rank's part of the sequence. `x` is this rank's part, and each part has a scale of
    its own.

    Backward gathers the sequence again for the weight's gradient, as codes of the same amax. That gradient is summed as
    in `gather_linear`.

    Args:
        x: `(batch, sequence / tp, ..., features_in)`, as in `linear_fp8`.
        weight: `(features_out, features_in)`, values or codes, as in `linear_fp8`.
        gradients: the format of the incoming gradient, `FP8_E5M2` or `FP8_E4M3`.
        axis: the tensor axis, which shards the sequence.
    """
    codes, slot = fp8_codes_and_slot(weight)
    return _gather_linear(x, codes, slot, gradients, axis, slot.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _gather_linear(
    x: jax.Array, weight: QuantizedArray, slot: jax.Array, gradients: Format, axis: str, dtype: np.dtype
) -> Parts:
    return _gather_linear_forward(x, weight, slot, gradients, axis, dtype)[0]


def _gather_linear_forward(
    x: jax.Array, weight: QuantizedArray, slot: jax.Array, gradients: Format, axis: str, dtype: np.dtype
):
    del slot, gradients, dtype
    now, kernel = refuse_second_derivative("gather_linear_fp8", (x, weight))
    amax = operand_amax(multi_amax([rows_of(now)]), FP8_E4M3)[0]

    def products(x: jax.Array, kernel: QuantizedArray, amax: jax.Array) -> Parts:
        own = quantize(rows_of(x), FP8_E4M3, amax=amax)
        return while_gathered(own, lambda part, _: _like(x, fp8_product(part, kernel, x.dtype, x.dtype)), axis)

    return as_one(products, now, kernel, amax), (x, weight, amax)


def _gather_linear_backward(gradients: Format, axis: str, dtype: np.dtype, saved, incoming: Parts):
    x, weight, amax, incoming = refuse_second_derivative("gather_linear_fp8", (*saved, incoming))
    both = _quantized_both(incoming, gradients)
    kernel, own = fp8_transposed(weight), quantize(rows_of(x), FP8_E4M3, amax=amax, axis="column")
    to_x = while_scattered(
        tuple(rows for rows, _ in both), lambda part: fp8_product(part, kernel, x.dtype, x.dtype), axis
    )
    term = term_dtype(axis, dtype)
    terms = while_gathered(own, lambda part, s: fp8_product(both[s][1], part, x.dtype, term), axis)
    return jnp.reshape(to_x, x.shape), None, sum_of_terms(terms, dtype)


_gather_linear.defvjp(_gather_linear_forward, _gather_linear_backward)


def linear_scatter_fp8(
    parts: tuple[Float[jax.Array, "batch part *inner features_in"], ...],
    weight: Float[jax.Array, "features_out features_in"] | SlottedWeight,
    gradients: Format,
    axis: str,
) -> Float[jax.Array, "batch part *inner features_out"]:
    """Applies `linear_fp8` to every part of the sequence, sums over ranks, and returns this rank's part of the result.
    Each part has a scale of its own.

    The sum is computed in the dtype of `parts`, as in a reduce-scatter. Backward gathers the gradient as codes.

    Args:
        parts: the parts of the sequence, `(batch, sequence / tp, ..., features_in)` each.
        weight: `(features_out, features_in)`, values or codes, as in `linear_fp8`.
        gradients: the format of the incoming gradient, `FP8_E5M2` or `FP8_E4M3`.
        axis: the tensor axis, which shards the sequence.
    """
    codes, slot = fp8_codes_and_slot(weight)
    return _linear_scatter(parts, codes, slot, gradients, axis, slot.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _linear_scatter(
    parts: Parts, weight: QuantizedArray, slot: jax.Array, gradients: Format, axis: str, dtype: np.dtype
) -> jax.Array:
    return _linear_scatter_forward(parts, weight, slot, gradients, axis, dtype)[0]


def _linear_scatter_forward(
    parts: Parts, weight: QuantizedArray, slot: jax.Array, gradients: Format, axis: str, dtype: np.dtype
):
    del slot, gradients, dtype
    now, kernel = refuse_second_derivative("linear_scatter_fp8", (parts, weight))
    amaxes = operand_amax(multi_amax([rows_of(part) for part in now]), FP8_E4M3)

    def product(parts: Parts, kernel: QuantizedArray, amaxes: jax.Array) -> jax.Array:
        dtype = parts[0].dtype
        codes = tuple(quantize(rows_of(part), FP8_E4M3, amax=amax) for part, amax in zip(parts, amaxes, strict=True))
        total = while_scattered(codes, lambda part: fp8_product(part, kernel, dtype, dtype), axis)
        return _like(parts[0], total)

    return as_one(product, now, kernel, amaxes), (parts, weight, amaxes)


def _linear_scatter_backward(gradients: Format, axis: str, dtype: np.dtype, saved, incoming: jax.Array):
    parts, weight, amaxes, incoming = refuse_second_derivative("linear_scatter_fp8", (*saved, incoming))
    rows, values = rows_of(incoming), parts[0].dtype
    own = quantize(rows, gradients, amax=power_of_two_amax(multi_amax([rows])[0], gradients))
    kernel, term = fp8_transposed(weight), term_dtype(axis, dtype)
    terms: list[jax.Array] = []

    def to_part(gradient: QuantizedArray, s: int) -> jax.Array:
        along_tokens = quantize(rows_of(parts[s]), FP8_E4M3, amax=amaxes[s], axis="column")
        terms.append(fp8_product(fp8_transposed(gradient), along_tokens, values, term))
        return jnp.reshape(fp8_product(gradient, kernel, values, values), parts[s].shape)

    return while_gathered(own, to_part, axis), None, sum_of_terms(terms, dtype)


_linear_scatter.defvjp(_linear_scatter_forward, _linear_scatter_backward)


def _quantized_both(parts: Parts, format: Format) -> list[tuple[QuantizedArray, QuantizedArray]]:
    """Returns the codes of each part by rows, and those by columns, with one amax for both."""
    rows = [rows_of(part) for part in parts]
    amaxes = power_of_two_amax(multi_amax(rows), format)
    copies = [quantize(part, format, amax=(amax, amax), axis="both") for part, amax in zip(rows, amaxes, strict=True)]
    return [(by_rows, by_columns) for by_rows, by_columns in copies]


def _like(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns rows in the dimensions of `x`, except for the last one."""
    return jnp.reshape(rows, (*x.shape[:-1], rows.shape[-1]))
