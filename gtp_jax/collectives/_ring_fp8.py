"""Overlaps FP8 matmuls with the communication of the sequence over tp: what is gathered travels as codes.

The functions have the order of those in `_ring` [Note: turns], and the products of `gtp_jax.ops.linear_fp8`. A rank
quantizes its own part of the sequence once, by the amax of that part, and sends the codes with the amax. So half the
bytes of bfloat16 travel, and no part is quantized by more than one rank. Sums over ranks travel as values, because the
sum of rounded sums would be rounded again at each rank. Called inside a `shard_map`.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from ..formats import QuantizedArray
from ..ops import Fp8Products, SlottedWeight, as_one, refuse_second_derivative, under
from ._ring import Parts, sum_of_terms, term_dtype, while_gathered, while_scattered
from ._rounded_rule import rounded_rule


def gather_linear_fp8(
    x: Float[jax.Array, "batch part *inner features_in"],
    weight: Float[jax.Array, "features_out features_in"] | SlottedWeight,
    products: Fp8Products,
    axis: str,
) -> tuple[Float[jax.Array, "batch part *inner features_out"], ...]:
    """Returns `linear_fp8` of every rank's part of the sequence. `x` is this rank's part.

    Backward gathers the sequence again for the weight's gradient, as codes of the same amax. That gradient is summed as
    in `gather_linear`.

    Args:
        x: `(batch, sequence / tp, ..., features_in)`.
        weight: `(features_out, features_in)`, as `products` takes it.
        products: how operands are rounded and multiplied. Each part has a scale of its own.
        axis: the tensor axis, which shards the sequence.
    """
    operand, slot = products.weight_and_slot(weight)
    return _gather_linear(x, operand, slot, products, axis, slot.dtype)


def _gathered_product(
    x: jax.Array, weight: Any, slot: jax.Array, products: Fp8Products, axis: str, *, backward: bool
) -> tuple[Parts, Any]:
    now, kernel, _ = refuse_second_derivative(products.name, (x, weight, slot))
    (own,), (saved,) = products.of_inputs([now], backward)
    lead, values = x.shape[:-1], x.dtype

    def multiplied(products: Fp8Products, own: QuantizedArray, kernel: Any) -> Parts:
        multiply = products.forward(kernel, values)
        return while_gathered(own, lambda part, _: under(lead, multiply(part)), axis)

    return as_one(multiplied, products, own, kernel), saved


def _gather_linear_backward(axis: str, dtype: np.dtype, residuals, incoming: Parts):
    saved, weight, products = residuals
    saved, weight, incoming = refuse_second_derivative(products.name, (saved, weight, incoming))
    values, lead, term = incoming[0].dtype, incoming[0].shape[:-1], term_dtype(axis, dtype)
    gradients, own = products.of_gradients(incoming), products.for_wgrad(saved)
    to_x = while_scattered([rows for rows, _ in gradients], products.dgrad(weight, values), axis)
    terms = while_gathered(own, lambda part, s: products.wgrad(gradients[s][1], part, values, term), axis)
    return under(lead, to_x), None, sum_of_terms(terms, dtype), None


_gather_linear = rounded_rule(_gathered_product, _gather_linear_backward)


def linear_scatter_fp8(
    parts: tuple[Float[jax.Array, "batch part *inner features_in"], ...],
    weight: Float[jax.Array, "features_out features_in"] | SlottedWeight,
    products: Fp8Products,
    axis: str,
) -> Float[jax.Array, "batch part *inner features_out"]:
    """Applies `linear_fp8` to every part of the sequence, sums over ranks, and returns this rank's part of the
    result.

    The sum is computed in the dtype of `parts`, as in a reduce-scatter. Backward gathers the gradient as codes.

    Args:
        parts: the parts of the sequence, `(batch, sequence / tp, ..., features_in)` each.
        weight: `(features_out, features_in)`, as `products` takes it.
        products: how operands are rounded and multiplied. Each part has a scale of its own.
        axis: the tensor axis, which shards the sequence.
    """
    operand, slot = products.weight_and_slot(weight)
    return _linear_scatter(parts, operand, slot, products, axis, slot.dtype)


def _scattered_product(
    parts: Parts, weight: Any, slot: jax.Array, products: Fp8Products, axis: str, *, backward: bool
) -> tuple[jax.Array, Any]:
    now, kernel, _ = refuse_second_derivative(products.name, (parts, weight, slot))
    codes, saved = products.of_inputs(now, backward)
    lead, values = parts[0].shape[:-1], parts[0].dtype

    def multiplied(products: Fp8Products, codes: list[QuantizedArray], kernel: Any) -> jax.Array:
        return under(lead, while_scattered(codes, products.forward(kernel, values), axis))

    return as_one(multiplied, products, codes, kernel), saved


def _linear_scatter_backward(axis: str, dtype: np.dtype, residuals, incoming: jax.Array):
    saved, weight, products = residuals
    saved, weight, incoming = refuse_second_derivative(products.name, (saved, weight, incoming))
    values, lead, term = incoming.dtype, incoming.shape[:-1], term_dtype(axis, dtype)
    multiply, terms = products.dgrad(weight, values), []

    def to_part(sent: Any, s: int) -> jax.Array:
        along_out, along_tokens = products.received(sent)
        terms.append(products.wgrad(along_tokens, products.for_wgrad(saved[s]), values, term))
        return under(lead, multiply(along_out))

    to_parts = while_gathered(products.to_send(incoming), to_part, axis)
    return to_parts, None, sum_of_terms(terms, dtype), None


_linear_scatter = rounded_rule(_scattered_product, _linear_scatter_backward)
