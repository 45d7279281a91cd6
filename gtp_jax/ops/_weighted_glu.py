"""The hidden features of an expert, each row times its share."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Float


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def weighted_glu(
    gate: Float[jax.Array, "rows hidden"],
    up: Float[jax.Array, "rows hidden"],
    shares: Float[jax.Array, " rows"],
    activation: Callable[[jax.Array], jax.Array],
) -> Float[jax.Array, "rows hidden"]:
    """Returns `activation(gate) * up * share` of each row, computed in float32 at least and rounded once.

    The matmul that follows is linear, so that a share counts ahead of it as it would behind it. Its input is all that
    backward needs of the experts' outputs: a share's gradient is the sum over hidden features of the unweighted row
    times what comes back through the matmul, in float32. Backward keeps `gate` and `up`, which the matmul ahead of them
    returns, and computes the rest again.

    Args:
        gate: to which the activation is applied.
        up: of the same dtype.
        shares: float32 at least.
        activation: elementwise.
    """
    return _product(activation, gate, up, shares)


def _product(
    activation: Callable[[jax.Array], jax.Array], gate: jax.Array, up: jax.Array, shares: jax.Array
) -> jax.Array:
    wide = jnp.promote_types(gate.dtype, jnp.float32)
    hidden = activation(gate.astype(wide)) * up.astype(wide)
    return (hidden * shares[:, None].astype(wide)).astype(gate.dtype)


def _fwd(gate: jax.Array, up: jax.Array, shares: jax.Array, activation: Callable[[jax.Array], jax.Array]):
    return _product(activation, gate, up, shares), (gate, up, shares)


def _bwd(
    activation: Callable[[jax.Array], jax.Array], saved: tuple[jax.Array, jax.Array, jax.Array], gradient: jax.Array
):
    return jax.vjp(functools.partial(_product, activation), *saved)[1](gradient)


weighted_glu.defvjp(_fwd, _bwd)
