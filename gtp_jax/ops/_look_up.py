"""Rows of a table by number."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def look_up(table: jax.Array, ids: jax.Array) -> jax.Array:
    """`table[ids]`; the table's gradient is summed in at least float32.

    A token that stands a thousand times in a batch adds a thousand rows into one. In 16 bits such a sum stands still
    once its last place outweighs what is added; and a GPU's 16-bit atomic additions to one address, which text makes
    by the thousand and random ids do not, take longer than all matmuls of a small model.

    Args:
        table: `(rows, features)`.
        ids: `(...)` integers; one outside is taken for the nearest inside.

    Returns:
        `(..., features)`, in the table's dtype.
    """
    # forward the conversion is fused into the gather; backward the sum is a float32 table for a while
    wide = table.astype(jnp.promote_types(table.dtype, jnp.float32))
    return jnp.take(wide, ids, axis=0, mode="clip").astype(table.dtype)
