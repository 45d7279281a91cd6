"""Operands of products whose gradients go elsewhere: in a dtype of their own, or to what codes were made of."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from ..formats import QuantizedArray

# The message of an operation whose gradient has no gradient.
SECOND_DERIVATIVE = (
    "a gradient is differentiated again through {}: a second derivative, as of a gradient penalty or in `jax.hessian`. "
    "Roundings have none. Compute that loss without `matmuls=True` in its recipe, whose weights may travel as codes "
    "all the same; or pass the gradient through `jax.lax.stop_gradient` if it is only reported."
)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def refuse_second_derivative(operation: str, operands: Any) -> Any:
    """Returns what the rules of a derivative compute with; an error if they are differentiated themselves.

    A product of rounded operands takes its inputs through this in both of its rules. So it is refused, too, where
    only what was rounded before depends on what is differentiated, of which nothing else could tell.

    Args:
        operation: what messages call it.
        operands: pytree of arrays.
    """
    del operation
    return operands


@refuse_second_derivative.defjvp
def _refuse(operation: str, primals: Any, tangents: Any) -> Any:
    raise TypeError(SECOND_DERIVATIVE.format(f"`{operation}`"))


def depends_on(codes: QuantizedArray, array: jax.Array) -> QuantizedArray:
    """Returns the same codes, whose amax depends on the array that they were made of, without a gradient: so a product
    refuses a second derivative with respect to that array."""
    return codes if codes.amax is None else dataclasses.replace(codes, amax=_linked(codes.amax, array))


@jax.custom_jvp
def _linked(amax: jax.Array, array: jax.Array) -> jax.Array:
    del array
    return amax


@_linked.defjvp
def _linked_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    amax = _linked(*primals)
    nothing = 0 * jnp.sum(tangents[1]).astype(amax.dtype)  # a constant would be no tangent, and be passed over
    return amax, jnp.broadcast_to(nothing, amax.shape)


class SlottedWeight(NamedTuple):
    """A weight as products take it, and where its gradient goes.

    JAX gives the gradient of an array in the array's own dtype. That of a bfloat16 weight would be rounded as it leaves
    the matmul, which summed it in float32; and codes, which are integers, have none.

    Attributes:
        values: an array, or codes where those are multiplied. A product gives them no gradient; the gradient of a
            product does, see [Note: second derivatives] in `gtp_jax.weights`.
        slot: of the weight's shape, in the dtype in which its gradient leaves the product. Its values are never read,
            so that XLA makes no array of it.
    """

    values: jax.Array | QuantizedArray
    slot: jax.Array


def slotted(values: jax.Array | QuantizedArray, slot: jax.Array) -> SlottedWeight:
    """Returns the two as a weight whose whole gradient is the slot's: what products leave there, and what gradients of
    products leave in the values."""
    if isinstance(values, QuantizedArray):
        return SlottedWeight(values, slot)
    return SlottedWeight(_moving_with(slot, values), slot)


@jax.custom_jvp
def _moving_with(slot: jax.Array, values: jax.Array) -> jax.Array:
    del slot
    return values


@_moving_with.defjvp
def _moving_with_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    # the values as they are, which may be a function of the shards in a derivative of this one
    return primals[1], tangents[0].astype(primals[1].dtype)


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
