"""The hidden features of an expert, each row times its share."""

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
    """Returns `activation(gate) * up * share` of each row, computed in float32 at least and rounded once.

    The matmul that follows is linear, so that a share counts ahead of it as it would behind it, and backward does not
    need what that matmul returns: a share's gradient is the sum over hidden features of `activation(gate) * up` times
    the gradient of this function's result, in float32. Backward keeps `gate` and `up` and computes the rest again.

    Args:
        gate: to which the activation is applied.
        up: of the same dtype.
        shares: float32 at least.
        activation: elementwise, of float32 at least. It may read parameters, which get their gradients.
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
