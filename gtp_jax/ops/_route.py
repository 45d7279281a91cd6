"""Which experts a token goes to."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax


def route(chance: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The likeliest experts of each token, and their shares, which sum to 1.

    Args:
        chance: `(..., experts)`, positive.
        count: experts a token.

    Returns:
        `(..., count)` experts, int32; `(..., count)` shares.
    """
    highest, chosen = lax.top_k(chance, count)
    return chosen, highest / jnp.sum(highest, axis=-1, keepdims=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def balanced(chance: jax.Array, load: jax.Array, weight: float) -> jax.Array:
    """`chance` as it is; in backward the gradient of a balance term is added, as if the loss had it.

    The term is `weight * sum(load * chance)`, which is least where every expert has as much to do: the sequence-wise
    balance loss of DeepSeek-V3 (arXiv 2412.19437, equations 17 to 20), summed over tokens. It depends on nothing but
    the token's own sequence, so that neither the mesh nor microbatches change it.

    Args:
        chance: `(batch, sequence, experts)`, a token's summing to 1.
        load: `(batch, experts)`: how many times its even share of a sequence's tokens an expert has. Held constant.
        weight: of the term.
    """
    del load, weight
    return chance


def _fwd(chance: jax.Array, load: jax.Array, weight: float):
    return chance, load


def _bwd(weight: float, load: jax.Array, gradient: jax.Array):
    return gradient + weight * load[:, None, :].astype(gradient.dtype), None


balanced.defvjp(_fwd, _bwd)
