"""Documents packed into one row, told apart by segment ids."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def positions_of(segment_ids: jax.Array) -> jax.Array:
    """Returns the position of each token in its own document: 0 wherever another document begins.

    Args:
        segment_ids: `(..., sequence)` integers, the whole sequence; a document is a run of equal ones.

    Returns:
        Same shape, int32.
    """
    place = lax.broadcasted_iota(jnp.int32, segment_ids.shape, segment_ids.ndim - 1)
    begins = jnp.concatenate(
        [jnp.ones_like(segment_ids[..., :1], bool), segment_ids[..., 1:] != segment_ids[..., :-1]], axis=-1
    )
    return place - lax.cummax(jnp.where(begins, place, 0), axis=segment_ids.ndim - 1)
