"""Overlaps FP8 matmuls with the communication of the sequence over tp: what is gathered travels as codes.

The functions have the order of those in `_ring` [Note: turns], and the products of `gtp_jax.ops.linear_fp8`. A rank
quantizes its own part of the sequence once, by the amax of that part, and sends the codes with the amax. So half the
bytes of bfloat16 travel, and no part is quantized by more than one rank. Sums over ranks travel as values, because the
sum of rounded sums would be rounded again at each rank. Called inside a `shard_map`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from ..formats import FP8_E4M3, Format, QuantizedArray
from ..ops import (
    SlottedWeight,
    as_one,
    codes_for_wgrad,
    codes_of_input,
    fp8_codes_and_slot,
    fp8_product,
    fp8_transposed,
    multi_amax,
    operand_amax,
    power_of_two_amax,
    quantize,
    refuse_second_derivative,
    rows_of,
    saves_codes,
)
from ._ring import Parts, sum_of_terms, term_dtype, while_gathered, while_scattered


class _Options(NamedTuple):
    """The static arguments of a product.

    Attributes:
        gradients: the format of the incoming gradient.
        axis: the tensor axis.
        dtype: the dtype of the weight's gradient.
        keep_codes: whether forward saves the codes of the input for backward, instead of its values.
    """

    gradients: Format
    axis: str
    dtype: np.dtype
    keep_codes: bool


def gather_linear_fp8(
    x: Float[jax.Array, "batch part *inner features_in"],
    weight: Float[jax.Array, "features_out features_in"] | SlottedWeight,
    gradients: Format,
    axis: str,
    *,
    keep_codes: bool | None = None,
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
        keep_codes: as in `linear_fp8`.
    """
    codes, slot = fp8_codes_and_slot(weight)
    return _gather_linear(x, codes, slot, _Options(gradients, axis, slot.dtype, saves_codes(keep_codes)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _gather_linear(x: jax.Array, weight: QuantizedArray, slot: jax.Array, options: _Options) -> Parts:
    # nothing is saved without a backward pass
    return _gather_linear_forward(x, weight, slot, options._replace(keep_codes=False))[0]


def _gather_linear_forward(x: jax.Array, weight: QuantizedArray, slot: jax.Array, options: _Options):
    del slot
    now, kernel = refuse_second_derivative("gather_linear_fp8", (x, weight))
    amax = operand_amax(multi_amax([rows_of(now)]), FP8_E4M3)[0]
    codes, kept = codes_of_input(now, amax, options.keep_codes)
    lead, values = x.shape[:-1], x.dtype

    def products(own: QuantizedArray, kernel: QuantizedArray) -> Parts:
        return while_gathered(
            own, lambda part, _: _under(lead, fp8_product(part, kernel, values, values)), options.axis
        )

    return as_one(products, codes, kernel), (x if kept is None else kept, weight, amax)


def _gather_linear_backward(options: _Options, saved, incoming: Parts):
    gradients, axis, dtype, _ = options
    x, weight, amax, incoming = refuse_second_derivative("gather_linear_fp8", (*saved, incoming))
    values, lead = incoming[0].dtype, incoming[0].shape[:-1]
    both = _quantized_both(incoming, gradients)
    kernel, own = fp8_transposed(weight), codes_for_wgrad(x, amax)
    to_x = while_scattered(
        tuple(rows for rows, _ in both), lambda part: fp8_product(part, kernel, values, values), axis
    )
    term = term_dtype(axis, dtype)
    terms = while_gathered(own, lambda part, s: fp8_product(both[s][1], part, values, term), axis)
    return _under(lead, to_x), None, sum_of_terms(terms, dtype)


_gather_linear.defvjp(_gather_linear_forward, _gather_linear_backward)


def linear_scatter_fp8(
    parts: tuple[Float[jax.Array, "batch part *inner features_in"], ...],
    weight: Float[jax.Array, "features_out features_in"] | SlottedWeight,
    gradients: Format,
    axis: str,
    *,
    keep_codes: bool | None = None,
) -> Float[jax.Array, "batch part *inner features_out"]:
    """Applies `linear_fp8` to every part of the sequence, sums over ranks, and returns this rank's part of the result.
    Each part has a scale of its own.

    The sum is computed in the dtype of `parts`, as in a reduce-scatter. Backward gathers the gradient as codes.

    Args:
        parts: the parts of the sequence, `(batch, sequence / tp, ..., features_in)` each.
        weight: `(features_out, features_in)`, values or codes, as in `linear_fp8`.
        gradients: the format of the incoming gradient, `FP8_E5M2` or `FP8_E4M3`.
        axis: the tensor axis, which shards the sequence.
        keep_codes: as in `linear_fp8`.
    """
    codes, slot = fp8_codes_and_slot(weight)
    return _linear_scatter(parts, codes, slot, _Options(gradients, axis, slot.dtype, saves_codes(keep_codes)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _linear_scatter(parts: Parts, weight: QuantizedArray, slot: jax.Array, options: _Options) -> jax.Array:
    # nothing is saved without a backward pass
    return _linear_scatter_forward(parts, weight, slot, options._replace(keep_codes=False))[0]


def _linear_scatter_forward(parts: Parts, weight: QuantizedArray, slot: jax.Array, options: _Options):
    del slot
    now, kernel = refuse_second_derivative("linear_scatter_fp8", (parts, weight))
    amaxes = operand_amax(multi_amax([rows_of(part) for part in now]), FP8_E4M3)
    codes, kept = zip(
        *(codes_of_input(part, amax, options.keep_codes) for part, amax in zip(now, amaxes, strict=True)), strict=True
    )
    lead, values = parts[0].shape[:-1], parts[0].dtype

    def product(codes: tuple[QuantizedArray, ...], kernel: QuantizedArray) -> jax.Array:
        return _under(
            lead, while_scattered(codes, lambda part: fp8_product(part, kernel, values, values), options.axis)
        )

    return as_one(product, codes, kernel), (kept if options.keep_codes else parts, weight, amaxes)


def _linear_scatter_backward(options: _Options, saved, incoming: jax.Array):
    gradients, axis, dtype, _ = options
    parts, weight, amaxes, incoming = refuse_second_derivative("linear_scatter_fp8", (*saved, incoming))
    rows, values, lead = rows_of(incoming), incoming.dtype, incoming.shape[:-1]
    own = quantize(rows, gradients, amax=power_of_two_amax(multi_amax([rows])[0], gradients))
    kernel, term = fp8_transposed(weight), term_dtype(axis, dtype)
    terms: list[jax.Array] = []

    def to_part(gradient: QuantizedArray, s: int) -> jax.Array:
        terms.append(fp8_product(fp8_transposed(gradient), codes_for_wgrad(parts[s], amaxes[s]), values, term))
        return _under(lead, fp8_product(gradient, kernel, values, values))

    return while_gathered(own, to_part, axis), None, sum_of_terms(terms, dtype)


_linear_scatter.defvjp(_linear_scatter_forward, _linear_scatter_backward)


def _quantized_both(parts: Parts, format: Format) -> list[tuple[QuantizedArray, QuantizedArray]]:
    """Returns the codes of each part by rows, and those by columns, with one amax for both."""
    rows = [rows_of(part) for part in parts]
    amaxes = power_of_two_amax(multi_amax(rows), format)
    copies = [quantize(part, format, amax=(amax, amax), axis="both") for part, amax in zip(rows, amaxes, strict=True)]
    return [(by_rows, by_columns) for by_rows, by_columns in copies]


def _under(lead: tuple[int, ...], rows: jax.Array) -> jax.Array:
    """Returns rows as `(*lead, features)`."""
    return jnp.reshape(rows, (*lead, rows.shape[-1]))
