"""The hidden features of an expert, with each row multiplied by its routing weight."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Float


def weighted_glu(
    gate: Float[jax.Array, "rows hidden"],
    up: Float[jax.Array, "rows hidden"],
    shares: Float[jax.Array, " rows"],
    activation: Callable[[jax.Array], jax.Array],
) -> Float[jax.Array, "rows hidden"]:
    """Returns `activation(gate) * up * share` of each row, computed in at least float32 and rounded once.

    `share` is the routing weight of a row. The following matmul is linear, so the routing weight has the same effect
    before it as after it. If it is applied before, backward does not need the output of that matmul: the gradient of a
    routing weight is the sum over hidden features of `activation(gate) * up` times the gradient of this function's
    result, in at least float32. The arguments are saved for backward, and the product is recomputed.

    Args:
        gate: the array to which the activation is applied.
        up: the array that multiplies it, of the same dtype.
        shares: the routing weight of each row, in at least float32.
        activation: an elementwise function of at least float32. It may read parameters, which get their gradients.
    """
    wide = jnp.promote_types(gate.dtype, jnp.float32)
    pure, parameters = jax.closure_convert(activation, jax.ShapeDtypeStruct(gate.shape, wide))
    return _weighted_glu(gate, up, shares, parameters, pure)


Activation = Callable[..., jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _weighted_glu(
    gate: jax.Array, up: jax.Array, shares: jax.Array, parameters: list[jax.Array], activation: Activation
) -> jax.Array:
    return _product(activation, gate, up, shares, parameters)


def _product(
    activation: Activation, gate: jax.Array, up: jax.Array, shares: jax.Array, parameters: list[jax.Array]
) -> jax.Array:
    wide = jnp.promote_types(gate.dtype, jnp.float32)
    hidden = activation(gate.astype(wide), *parameters) * up.astype(wide)
    return (hidden * shares[:, None].astype(wide)).astype(gate.dtype)


def _fwd(gate: jax.Array, up: jax.Array, shares: jax.Array, parameters: list[jax.Array], activation: Activation):
    return _product(activation, gate, up, shares, parameters), (gate, up, shares, parameters)


def _bwd(activation: Activation, saved: tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]], gradient: jax.Array):
    return jax.vjp(functools.partial(_product, activation), *saved)[1](gradient)


_weighted_glu.defvjp(_fwd, _bwd)
