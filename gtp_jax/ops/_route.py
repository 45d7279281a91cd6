"""What a router of experts adds to the gradients, and not to the loss that is reported."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Float


@jax.custom_vjp
def with_aux_loss(x: Float[jax.Array, "*shape"], term: Float[jax.Array, ""]) -> Float[jax.Array, "*shape"]:
    """Returns `x` as it is; in backward gradients of `term` are added, as if it were a part of the loss.

    Args:
        x: what the loss depends on.
        term: a scalar.
    """
    del term
    return x


def _aux_fwd(x: jax.Array, term: jax.Array):
    return x, term


def _aux_bwd(term: jax.Array, gradient: jax.Array):
    return gradient, jnp.ones_like(term)


with_aux_loss.defvjp(_aux_fwd, _aux_bwd)


@jax.custom_vjp
def with_load_as_gradient(
    x: Float[jax.Array, "*shape"], bias: Float[jax.Array, " experts"], load: Float[jax.Array, " experts"]
) -> Float[jax.Array, "*shape"]:
    """Returns `x` as it is; in backward `load` becomes the gradient of `bias`.

    So it is summed over microbatches and ranks as gradients are, in the same reductions, and in training alone.

    Args:
        x: what the loss depends on.
        bias: of a router.
        load: how many tokens chose each expert.
    """
    del bias, load
    return x


def _load_fwd(x: jax.Array, bias: jax.Array, load: jax.Array):
    return x, load.astype(bias.dtype)


def _load_bwd(load: jax.Array, gradient: jax.Array):
    return gradient, load, None


with_load_as_gradient.defvjp(_load_fwd, _load_bwd)
