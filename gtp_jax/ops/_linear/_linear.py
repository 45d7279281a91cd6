"""The matmul of dense layers whose operands are not quantized."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float

from .._one_row import is_one_row, one_row_einsum
from .._slot import SlottedWeight, values_and_slot


def linear(
    x: Float[jax.Array, "*rows features_in"],
    weight: Float[jax.Array, "features_out features_in"] | SlottedWeight,
    precision: Any = None,
) -> Float[jax.Array, "*rows features_out"]:
    """Returns `x @ weight.T`: maps `(..., features_in)` and `(features_out, features_in)` to `(..., features_out)`.

    Output features are the first dimension of the weight, so that a gather can concatenate shards in order of rank
    without a copy. The gradient of a slot is summed and returned in the slot's dtype.

    Args:
        x: the other operand.
        weight: the weight.
        precision: the precision of the product and of its gradients, as in `jax.lax.dot_general`.
    """
    if not isinstance(weight, SlottedWeight):
        return _product(x, weight, precision)
    values, slot = values_and_slot(weight)
    return _linear(x, values, slot, slot.dtype, precision)


def to_input(
    gradient: Float[jax.Array, "*rows features_out"],
    weight: Float[jax.Array, "features_out features_in"],
    precision: Any = None,
) -> Float[jax.Array, "*rows features_in"]:
    """Returns the gradient of `x`, given the gradient of `linear(x, weight)`."""
    return lax.dot_general(gradient, weight, (((gradient.ndim - 1,), (0,)), ((), ())), precision)


def to_weight(
    gradient: Float[jax.Array, "*rows features_out"],
    x: Float[jax.Array, "*rows features_in"],
    dtype: np.dtype,
    precision: Any = None,
) -> Float[jax.Array, "features_out features_in"]:
    """Returns the gradient of `weight` in this dtype, given the gradient of `linear(x, weight)`."""
    # XLA's CPU compiler does not support a transposed bfloat16 product with a float32 sum over several dimensions
    gradient, x = (jnp.reshape(a, (-1, a.shape[-1])) for a in (gradient, x))
    return lax.dot_general(gradient, x, (((0,), (0,)), ((), ())), precision, dtype)


def _product(x: jax.Array, weight: jax.Array, precision: Any) -> jax.Array:
    if is_one_row(*x.shape[:-1]):
        product = one_row_einsum("k,nk->n", jnp.reshape(x, -1), weight)
        return jnp.reshape(product, (*x.shape[:-1], -1)).astype(jnp.result_type(x, weight))
    return lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), precision)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _linear(x: jax.Array, weight: jax.Array, slot: jax.Array, dtype: np.dtype, precision: Any) -> jax.Array:
    del slot, dtype
    return _product(x, weight, precision)


def _forward(x: jax.Array, weight: jax.Array, slot: jax.Array, dtype: np.dtype, precision: Any):
    del slot, dtype
    return _product(x, weight, precision), (x, weight)


def _backward(dtype: np.dtype, precision: Any, saved: tuple[jax.Array, jax.Array], gradient: jax.Array):
    x, weight = saved
    return to_input(gradient, weight, precision), None, to_weight(gradient, x, dtype, precision)


_linear.defvjp(_forward, _backward)
