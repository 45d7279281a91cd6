"""Operands of products whose gradients go elsewhere: in a dtype of their own, or to what codes were made of."""

from __future__ import annotations

from typing import NamedTuple

import jax
from jaxtyping import Float

from ..formats import QuantizedArray


class SlottedWeight(NamedTuple):
    """A weight as products take it, and where its gradient goes.

    JAX gives the gradient of an array in the array's own dtype. That of a bfloat16 weight would be rounded as it leaves
    the matmul, which summed it in float32; and codes, which are integers, have none.

    Attributes:
        values: an array, or codes where those are multiplied. They have no gradient.
        slot: of the weight's shape, in the dtype in which its gradient leaves the product. Its values are never read,
            so that XLA makes no array of it.
    """

    values: jax.Array | QuantizedArray
    slot: jax.Array


class SlottedRows(NamedTuple):
    """Rows of which a product has only the codes, and where their gradient goes.

    Attributes:
        codes: row-wise, as `rows_in_codes` makes them. They have no gradient.
        slot: of the rows' shape and dtype. Its values are never read, so that XLA makes no array of it.
    """

    codes: QuantizedArray
    slot: jax.Array


def values_and_slot(
    weight: Float[jax.Array, "*shape"] | SlottedWeight,
) -> tuple[Float[jax.Array, "*shape"], Float[jax.Array, "*shape"]]:
    """Returns the array that is multiplied, and what has the gradient: of a weight without a slot itself.

    Raises:
        TypeError: if the weight is codes, which this product does not multiply.
    """
    if not isinstance(weight, SlottedWeight):
        return weight, weight
    if isinstance(weight.values, QuantizedArray):
        raise TypeError(
            f"`weight` is codes of {weight.values.format.name}, which only `linear_fp8` and `grouped_fp8` multiply. "
            "Pass their values: `gtp_jax.dequantize(codes, dtype)`."
        )
    return weight.values, weight.slot
