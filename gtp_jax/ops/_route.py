"""Terms that a router of experts adds to the gradients, but not to the reported loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Float


@jax.custom_vjp
def with_aux_loss(x: Float[jax.Array, "*shape"], term: Float[jax.Array, ""]) -> Float[jax.Array, "*shape"]:
    """Returns `x` unchanged. In backward, the gradients of `term` are added, as if it were part of the loss.

    Args:
        x: an array that the loss depends on.
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
    """Returns `x` unchanged. In backward, `load` becomes the gradient of `bias`.

    The load is therefore summed over microbatches and ranks in the same reductions as gradients, and only in training.

    Args:
        x: an array that the loss depends on.
        bias: the bias of a router.
        load: the number of tokens that chose each expert.
    """
    del bias, load
    return x


def _load_fwd(x: jax.Array, bias: jax.Array, load: jax.Array):
    return x, load.astype(bias.dtype)


def _load_bwd(load: jax.Array, gradient: jax.Array):
    return gradient, load, None


with_load_as_gradient.defvjp(_load_fwd, _load_bwd)
