"""Operands of products with a slot for their gradient: in a dtype of its own, or for operands that are codes."""

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
    "Roundings have none. Compute that loss with a recipe that only sends codes, such as `gtp_jax.FP8()` without "
    "`matmuls=True`; or pass the gradient through `jax.lax.stop_gradient` if it is only reported."
)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def refuse_second_derivative(operation: str, operands: Any) -> Any:
    """Returns the operands of a derivative rule unchanged; raises an error if the rule itself is differentiated.

    A product of rounded operands passes its inputs through this function in both of its rules. So the error is also
    raised if only an operand that was rounded earlier depends on the variable of the second derivative, which nothing
    else could detect.

    Args:
        operation: the name of the operation in the message.
        operands: a pytree of arrays.
    """
    del operation
    return operands


@refuse_second_derivative.defjvp
def _refuse(operation: str, primals: Any, tangents: Any) -> Any:
    raise TypeError(SECOND_DERIVATIVE.format(f"`{operation}`"))


def depends_on(codes: QuantizedArray, array: jax.Array) -> QuantizedArray:
    """Returns the same codes, with an amax that depends on the array from which they were made, but has a gradient of
    zero. So a product raises an error for a second derivative with respect to that array. Codes without an amax are
    returned unchanged."""
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
    nothing = 0 * jnp.sum(tangents[1]).astype(amax.dtype)  # JAX would ignore a constant 0, which is no tangent
    return amax, jnp.broadcast_to(nothing, amax.shape)


class SlottedWeight(NamedTuple):
    """A weight as an operand of products, with a slot that receives its gradient.

    JAX returns the gradient of an array in the array's own dtype. The gradient of a bfloat16 weight would be rounded
    when it leaves the matmul, which summed it in float32; and codes have no gradient, because they are integers.

    Attributes:
        values: an array, or codes for products that multiply codes. A product gives them no gradient; the gradient of a
            product does, see [Note: second derivatives] in `gtp_jax.weights`.
        slot: an array of the weight's shape, in the dtype in which the gradient leaves the product. Its values are
            never read, so XLA does not allocate it.
    """

    values: jax.Array | QuantizedArray
    slot: jax.Array


def slotted(values: jax.Array | QuantizedArray, slot: jax.Array) -> SlottedWeight:
    """Returns a weight whose slot receives the whole gradient: what products add to the slot, and what gradients of
    products add to the values."""
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
    # return `values` itself, because in a derivative of this rule it may be a function of the shards
    return primals[1], tangents[0].astype(primals[1].dtype)


class SlottedRows(NamedTuple):
    """Rows that a product receives only as codes, with a slot that receives their gradient.

    Attributes:
        codes: the row-wise codes, as `rows_in_codes` makes them. They have no gradient.
        slot: an array of the rows' shape and dtype. Its values are never read, so XLA does not allocate it.
    """

    codes: QuantizedArray
    slot: jax.Array


def values_and_slot(
    weight: Float[jax.Array, "*shape"] | SlottedWeight,
) -> tuple[Float[jax.Array, "*shape"], Float[jax.Array, "*shape"]]:
    """Returns the array that is multiplied, and the array that receives the gradient: the slot, or the weight itself if
    it has no slot.

    Raises:
        TypeError: if the weight is codes, which the calling product does not multiply.
    """
    if not isinstance(weight, SlottedWeight):
        return weight, weight
    if isinstance(weight.values, QuantizedArray):
        raise TypeError(
            f"`weight` is codes of {weight.values.format.name}, which only products in FP8 multiply. "
            "Pass their values: `gtp_jax.ops.dequantize(codes, dtype)`."
        )
    return weight.values, weight.slot
