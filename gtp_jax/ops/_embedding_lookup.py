"""Looks up rows of an embedding table."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ._ids import to_index
from ._slot import SlottedWeight, values_and_slot


def embedding_lookup(table: jax.Array | SlottedWeight, ids: jax.Array | np.ndarray) -> jax.Array:
    """Returns `table[ids]`. The gradient of the table is summed in at least float32.

    An id outside the table, including a negative one, gets a row of NaN and adds nothing to the table's gradient.

    A token that occurs a thousand times in a batch adds a thousand gradient rows into one. In 16 bits, such a sum
    stagnates: additions fall below its last bit. On a GPU, 16-bit atomic additions to the same address also take longer
    than all matmuls of a small model. Text causes thousands of them; random ids do not.

    Args:
        table: `(rows, features)`.
        ids: `(...)` integers.

    Returns:
        `(..., features)`, in the table's dtype. The gradient of a slot has the slot's dtype.
    """
    ids = to_index(jnp.asarray(ids))
    if not isinstance(table, SlottedWeight):
        return _take(table, ids)
    values, slot = values_and_slot(table)
    return _embedding_lookup(values, slot, ids, slot.shape, slot.dtype)


def _take(table: jax.Array, ids: jax.Array) -> jax.Array:
    # in forward, the conversion is fused into the gather; in backward, the sum is temporarily a float32 table
    wide = table.astype(jnp.promote_types(table.dtype, jnp.float32))
    return _rows(wide, ids).astype(table.dtype)


def _rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    inside = (ids >= 0) & (ids < table.shape[0])
    return jnp.where(inside[..., None], jnp.take(table, ids, axis=0, mode="clip"), jnp.nan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _embedding_lookup(
    table: jax.Array, slot: jax.Array, ids: jax.Array, shape: tuple[int, ...], dtype: np.dtype
) -> jax.Array:
    del slot, shape, dtype
    return _take(table, ids)


def _forward(table: jax.Array, slot: jax.Array, ids: jax.Array, shape: tuple[int, ...], dtype: np.dtype):
    del slot, shape, dtype
    return _take(table, ids), ids


def _backward(shape: tuple[int, ...], dtype: np.dtype, ids: jax.Array, gradient: jax.Array):
    wide = jnp.promote_types(dtype, jnp.float32)
    to_table = jax.linear_transpose(lambda table: _rows(table, ids), jax.ShapeDtypeStruct(shape, wide))
    return None, to_table(gradient.astype(wide))[0].astype(dtype), None


_embedding_lookup.defvjp(_forward, _backward)
