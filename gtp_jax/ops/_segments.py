"""Documents that are packed into one row, and distinguished by segment ids."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def positions_of(segment_ids: jax.Array) -> jax.Array:
    """Returns the position of each token within its own document, counted from 0.

    Args:
        segment_ids: `(..., sequence)` integers of the whole sequence. A document is a run of equal ids.

    Returns:
        int32 positions, of the same shape.
    """
    place = lax.broadcasted_iota(jnp.int32, segment_ids.shape, segment_ids.ndim - 1)
    begins = jnp.concatenate(
        [jnp.ones_like(segment_ids[..., :1], bool), segment_ids[..., 1:] != segment_ids[..., :-1]], axis=-1
    )
    return place - lax.cummax(jnp.where(begins, place, 0), axis=segment_ids.ndim - 1)
