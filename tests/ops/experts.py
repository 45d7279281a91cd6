"""What tests of experts' matmuls share: groups of rows, tokens with places in groups, and blocks of 128."""

import jax
import jax.numpy as jnp
import numpy as np

import gtp_jax as gtp
from gtp_jax.ops import window_of

KEY = jnp.zeros(2, jnp.uint32)
OPERANDS = gtp.recipes.FP8Blocks().operands
ROW, TILE = (1, 128), (128, 128)


def groups_of(sizes):
    """The rows of each group."""
    sizes = np.asarray(sizes)
    return [slice(end - size, end) for end, size in zip(np.cumsum(sizes), sizes, strict=True)]


def window_and_sizes(rng, tokens, top_k, groups, present=None):
    """A window of random choices, some without a place (a share of `present` has one), and the sizes of groups."""
    kept = True if present is None else rng.random((tokens, top_k)) < present
    group = np.where(kept, rng.integers(0, groups + (present is None), (tokens, top_k)), groups)
    order = np.argsort(group.ravel(), kind="stable").astype(np.int32)
    places = np.argsort(order).astype(np.int32).reshape(tokens, top_k)
    sizes = np.bincount(group.ravel(), minlength=groups + 1)[:groups].astype(np.int32)
    made = jax.jit(window_of, static_argnums=(3, 4))
    window = made(jnp.asarray(order), jnp.asarray(places), np.int32(sizes.sum()), 0, order.size)
    return window, jnp.asarray(sizes)
