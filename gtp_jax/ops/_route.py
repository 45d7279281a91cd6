"""Routes tokens to experts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int32


def route(
    probs: Float[jax.Array, "*tokens experts"], count: int
) -> tuple[Int32[jax.Array, "*tokens {count}"], Float[jax.Array, "*tokens {count}"]]:
    """Returns the likeliest experts of each token, and their combine weights, which sum to 1.

    Args:
        probs: `(..., experts)`, positive.
        count: experts a token.

    Returns:
        `(..., count)` experts, int32; `(..., count)` combine weights.
    """
    highest, chosen = lax.top_k(probs, count)
    return chosen, highest / jnp.sum(highest, axis=-1, keepdims=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def with_aux_loss_gradient(
    probs: Float[jax.Array, "batch sequence experts"], load: Float[jax.Array, "batch experts"], weight: float
) -> Float[jax.Array, "batch sequence experts"]:
    """Returns `probs` as it is; in backward the gradient of a balance term is added, as if the loss had it.

    The term is `weight * sum(load * probs)`, which is least where every expert has as much to do: the sequence-wise
    balance loss of DeepSeek-V3 (arXiv 2412.19437, equations 17 to 20), summed over tokens. It depends on nothing but
    the token's own sequence, so that neither the mesh nor microbatches change it.

    Args:
        probs: `(batch, sequence, experts)`, a token's summing to 1.
        load: `(batch, experts)`: how many times its even share of a sequence's tokens an expert has. Held constant.
        weight: of the term.
    """
    del load, weight
    return probs


def _fwd(probs: jax.Array, load: jax.Array, weight: float):
    return probs, load


def _bwd(weight: float, load: jax.Array, gradient: jax.Array):
    return gradient + weight * load[:, None, :].astype(gradient.dtype), None


with_aux_loss_gradient.defvjp(_fwd, _bwd)
