"""Matmuls of rounded operands over a sequence that is sent at once: what is gathered are codes.

A rank rounds its own part of the sequence once, and sends the codes with their scales: about half the bytes of bfloat16
for 8 bits. The codes of the whole sequence are multiplied at once. They are those of the whole, gathered and then
rounded, if no block of tokens is in two parts (`Operands.blocks_divide`). Sums over ranks travel as values, as in
`_ring_fp8`. Called inside a `shard_map`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from ..formats import QuantizedArray
from ..mesh import degree
from ..ops import Products, SlottedWeight, refuse_second_derivative, under
from ._over_gloo import all_gather
from ._rounded_rule import rounded_rule
from ._sequence import reduce_scatter_sequence
from ._turns import at_once


def gather_linear_blocks(
    x: Float[jax.Array, "batch part *inner features_in"],
    weight: Float[jax.Array, "features_out features_in"] | SlottedWeight,
    products: Products,
    axis: str,
) -> Float[jax.Array, "batch sequence *inner features_out"]:
    """Returns `linear_rounded` of the whole sequence. `x` is this rank's part.

    Only that part is saved for backward, which gathers its codes along the tokens for the weight's gradient.

    Args:
        x: `(batch, sequence / tp, ..., features_in)`.
        weight: `(features_out, features_in)`, as `products` takes it.
        products: how operands are rounded and multiplied, in formats with blocks.
        axis: the tensor axis, which shards the sequence.
    """
    operand, slot = products.weight_and_slot(weight)
    return _gathered_linear(x, operand, slot, products, axis, slot.dtype)


def _gathered_product(
    x: jax.Array, weight: Any, slot: jax.Array, products: Products, axis: str, *, backward: bool
) -> tuple[jax.Array, Any]:
    now, kernel, _ = refuse_second_derivative(products.name, (x, weight, slot))
    (own,), (saved,) = products.of_inputs([now], backward)
    y = products.forward(kernel, x.dtype)(_of_all(own, len(x), axis))
    batch, part, *inner = x.shape[:-1]
    return under((batch, part * degree(axis), *inner), y), saved


def _gathered_linear_backward(axis: str, dtype: np.dtype, residuals, gradient: jax.Array):
    saved, weight, products = residuals
    saved, weight, gradient = refuse_second_derivative(products.name, (saved, weight, gradient))
    ((along_out, along_tokens),) = products.of_gradients([gradient])
    # under dgrad: later, it would wait for gradients that are summed over gtp, and earlier, delay the incoming gradient
    own, along_out = at_once(products.for_wgrad(saved), along_out)
    to_x = products.dgrad(weight, gradient.dtype)(along_out)
    x_tokens, to_x = at_once(_of_all(own, len(gradient), axis), under(gradient.shape[:-1], to_x))
    to_weight = products.wgrad(along_tokens, x_tokens, gradient.dtype, dtype)
    return reduce_scatter_sequence(to_x, axis, sequence_parallel=True), None, to_weight, None


_gathered_linear = rounded_rule(_gathered_product, _gathered_linear_backward)


def linear_scatter_blocks(
    x: Float[jax.Array, "batch sequence *inner features_in"],
    weight: Float[jax.Array, "features_out features_in"] | SlottedWeight,
    products: Products,
    axis: str,
) -> Float[jax.Array, "batch part *inner features_out"]:
    """Returns this rank's part of `linear_rounded`, summed over ranks in the dtype of `x`. Backward gathers the
    gradient as codes.

    Args:
        x: the whole sequence, `(batch, sequence, ..., features_in)`.
        weight: `(features_out, features_in)`, as `products` takes it.
        products: how operands are rounded and multiplied, in formats with blocks.
        axis: the tensor axis, which shards the sequence.

    Raises:
        ValueError: if the axis does not divide the sequence.
    """
    operand, slot = products.weight_and_slot(weight)
    return _linear_scattered(x, operand, slot, products, axis, slot.dtype)


def _scattered_product(
    x: jax.Array, weight: Any, slot: jax.Array, products: Products, axis: str, *, backward: bool
) -> tuple[jax.Array, Any]:
    now, kernel, _ = refuse_second_derivative(products.name, (x, weight, slot))
    (codes,), (saved,) = products.of_inputs([now], backward)
    y = under(x.shape[:-1], products.forward(kernel, x.dtype)(codes))
    return reduce_scatter_sequence(y, axis, sequence_parallel=True), saved


def _linear_scattered_backward(axis: str, dtype: np.dtype, residuals, gradient: jax.Array):
    saved, weight, products = residuals
    saved, weight, gradient = refuse_second_derivative(products.name, (saved, weight, gradient))
    along_out, along_tokens = (_of_all(own, len(gradient), axis) for own in products.of_gradients([gradient])[0])
    batch, part, *inner = gradient.shape[:-1]
    to_x = under((batch, part * degree(axis), *inner), products.dgrad(weight, gradient.dtype)(along_out))
    to_weight = products.wgrad(along_tokens, products.for_wgrad(saved), gradient.dtype, dtype)
    return to_x, None, to_weight, None


_linear_scattered = rounded_rule(_scattered_product, _linear_scattered_backward)


def _of_all(own: QuantizedArray, batch: int, axis: str) -> QuantizedArray:
    """Returns the codes of the whole sequence, given those of this rank's part, `batch * part` tokens."""
    dim = int(own.columns and own.format.transposed_columns)

    def gathered(a: jax.Array) -> jax.Array:
        before, after = a.shape[:dim], a.shape[dim + 1 :]
        examples = jnp.reshape(a, (*before, batch, a.shape[dim] // batch, *after))
        return jnp.reshape(all_gather(examples, axis, dim=dim + 1), (*before, -1, *after))

    tokens, features = own.matrix
    codes, scales = gathered(own.codes), None if own.scales is None else gathered(own.scales)
    return QuantizedArray(codes, scales, own.amax, own.format, (tokens * degree(axis), features), own.columns)
