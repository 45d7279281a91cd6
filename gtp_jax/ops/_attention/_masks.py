"""Computes where a query may attend, as boolean arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def in_order(queries: int, keys: int, causal: bool, window: int | None, first: jax.Array | int = 0) -> jax.Array | None:
    """Returns where a query may attend according to positions alone; `None` for everywhere.

    Args:
        queries, keys: the number of queries and of keys.
        causal, window: as in `attention`.
        first: the position of the first query among the keys, one for all examples or `(batch,)`.

    Returns:
        `(queries, keys)`; `(batch or 1, 1, queries, keys)` if the position of the first query is given as an array or
        is not 0.
    """
    if not causal and window is None:
        return None
    ahead = jnp.arange(queries)[:, None] - jnp.arange(keys)
    if not (isinstance(first, int) and first == 0):
        ahead = ahead + jnp.reshape(jnp.asarray(first), (-1, 1, 1, 1))
    near = None if window is None else jnp.abs(ahead) < window
    return both(ahead >= 0 if causal else None, near)


def allowed_by(mask: jax.Array | None, segment_ids: Any) -> jax.Array | None:
    """Returns where a query may attend according to mask and segments, in four dimensions; `None` for everywhere."""
    allowed = None
    if mask is not None:
        allowed = mask if mask.ndim == 4 else mask[:, None] if mask.ndim == 3 else mask[None, None]
    if segment_ids is not None:
        of_queries, of_keys = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        same = (of_queries[:, :, None] == of_keys[:, None, :])[:, None]
        allowed = both(allowed, same)
    return allowed


def both(one: jax.Array | None, other: jax.Array | None) -> jax.Array | None:
    """Returns where both masks are true; `None` is a mask that is true everywhere."""
    return other if one is None else one if other is None else one & other


def by_group(allowed: jax.Array, kv_heads: int) -> jax.Array:
    """Returns `(batch, heads, queries, keys)` as `(batch, kv_heads, group, queries, keys)`; one head becomes a single
    group of one."""
    batch, heads, *lengths = allowed.shape
    return jnp.reshape(allowed, (batch, *((1, 1) if heads == 1 else (kv_heads, heads // kv_heads)), *lengths))
