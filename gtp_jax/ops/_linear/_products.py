"""The products of a dense layer with rounded operands: what every kind of rounding defines."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from ...formats import QuantizedArray
from .._slot import SlottedWeight, refuse_second_derivative

# Codes of an incoming gradient: those along its features, which dgrad multiplies, and along its tokens, for wgrad.
Gradient = tuple[QuantizedArray, QuantizedArray]


@runtime_checkable
class Products(Protocol):
    """Rounds the operands of a dense layer's forward, dgrad and wgrad, and multiplies them. A pytree.

    Operands come in parts of their tokens, each of which is rounded by itself. So a rank can round its part of a
    sequence once, and send the codes instead of the values.

    Attributes:
        name: the operation in error messages.
    """

    @property
    def name(self) -> str: ...

    def weight_and_slot(self, weight: jax.Array | SlottedWeight) -> tuple[Any, jax.Array]:
        """Returns the weight as the other methods take it, and the array that receives its gradient."""
        ...

    def of_inputs(self, parts: Sequence[jax.Array], backward: bool) -> tuple[list[QuantizedArray], list[Any]]:
        """Returns, for each part `(..., features_in)` of an input, the codes that forward multiplies, and what it saves
        for wgrad. The latter means nothing if there is no backward pass."""
        ...

    def for_wgrad(self, saved: Any) -> QuantizedArray:
        """Returns the codes of a part of the input along its tokens, given what `of_inputs` saved of it."""
        ...

    def of_gradients(self, parts: Sequence[jax.Array]) -> list[Gradient]:
        """Returns the codes of each part `(..., features_out)` of the incoming gradient."""
        ...

    def forward(self, weight: Any, dtype: np.dtype) -> Callable[[QuantizedArray], jax.Array]:
        """Returns the function from codes of the input to `(tokens, features_out)`, in `dtype`."""
        ...

    def dgrad(self, weight: Any, dtype: np.dtype) -> Callable[[QuantizedArray], jax.Array]:
        """Returns the function from codes of the gradient along its features to `(tokens, features_in)`, in `dtype`."""
        ...

    def wgrad(self, gradient: QuantizedArray, x: QuantizedArray, dtype: np.dtype, out: np.dtype) -> jax.Array:
        """Returns the gradient of the weight in the dtype `out`, given the codes of both operands along their tokens.
        Values are multiplied in `dtype`."""
        ...


def linear_rounded(
    x: Float[jax.Array, "*rows features_in"],
    weight: Float[jax.Array, "features_out features_in"] | SlottedWeight,
    products: Products,
) -> Float[jax.Array, "*rows features_out"]:
    """Returns `x @ weight.T`, where `products` rounds and multiplies the operands of all three products.

    Args:
        x: `(..., features_in)`.
        weight: `(features_out, features_in)`, as `products` takes it.
        products: the formats, and how they are multiplied.
    """
    operand, slot = products.weight_and_slot(weight)
    return _linear(x, operand, slot, products, slot.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _linear(x: jax.Array, weight: Any, slot: jax.Array, products: Products, dtype: np.dtype) -> jax.Array:
    del dtype
    return _product(x, weight, slot, products, backward=False)[0]


def _product(x: jax.Array, weight: Any, slot: jax.Array, products: Products, *, backward: bool):
    now, kernel, _ = refuse_second_derivative(products.name, (x, weight, slot))
    (codes,), (saved,) = products.of_inputs([now], backward)
    return under(x.shape[:-1], products.forward(kernel, x.dtype)(codes)), saved


def _forward(x: jax.Array, weight: Any, slot: jax.Array, products: Products, dtype: np.dtype):
    del dtype
    y, saved = _product(x, weight, slot, products, backward=True)
    return y, (saved, weight, products)


def _backward(dtype: np.dtype, residuals, gradient: jax.Array):
    saved, weight, products = residuals
    saved, weight, gradient = refuse_second_derivative(products.name, (saved, weight, gradient))
    ((along_out, along_tokens),) = products.of_gradients([gradient])
    to_x = products.dgrad(weight, gradient.dtype)(along_out)
    to_weight = products.wgrad(along_tokens, products.for_wgrad(saved), gradient.dtype, dtype)
    return under(gradient.shape[:-1], to_x), None, to_weight, None


_linear.defvjp(_forward, _backward)


def under(lead: tuple[int, ...], rows: jax.Array) -> jax.Array:
    """Returns rows as `(*lead, features)`."""
    return jnp.reshape(rows, (*lead, rows.shape[-1]))
