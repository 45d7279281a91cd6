"""Caches the keys and values of previous tokens, so that a call computes only those of the next token.

A cache is a ring of slots: the token at position p of its sequence is in slot `p % slots`. If there is a slot for every
token, no slot is used twice. With an attention window, `window` slots are enough, because they hold all tokens to which
the latest token may attend.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class Cache(nnx.Variable):
    """The cached keys, or values, of one attention layer, `(batch, slots, kv_heads, head_dim)`, or the number of calls
    that filled them, int32 `()`. In a `Stack`, there is a leading dimension of layers. The batch axes shard the batch,
    and the tensor axis shards the heads.

    `gtp_jax.generation.generate` gives caches to a copy of a model, and reads what its calls have written. The metadata
    `filled` states whether the caches already hold tokens. If they do, a call adds one token to each sequence;
    otherwise, the sequences begin with the call.
    """


def filled_from(x: jax.Array, places: jax.Array, slots: int) -> jax.Array:
    """Returns the cache of sequences that begin with this call.

    Args:
        x: the keys or values, `(batch, sequence, kv_heads, head_dim)`.
        places: the positions, `(batch, sequence)`: 0, 1, ... up to the last token of each row. The padding after that
            token repeats its position.
        slots: the number of slots.
    """
    length = x.shape[1]
    if slots >= length:  # later tokens overwrite the slots of padding before any token attends to them
        return jnp.pad(x, ((0, 0), (0, slots - length), (0, 0), (0, 0)))
    kept = jnp.maximum(_places_of_slots(places[:, -1], slots), 0)
    return jnp.take_along_axis(x, kept[..., None, None], axis=1)


def with_token(cached: jax.Array, x: jax.Array, places: jax.Array) -> jax.Array:
    """Returns the cache with one more token in each sequence.

    Args:
        cached: the cache, `(batch, slots, kv_heads, head_dim)`.
        x: the keys or values of the new tokens, `(batch, 1, kv_heads, head_dim)`.
        places: the positions of the new tokens in their sequences, `(batch,)`.
    """
    return cached.at[jnp.arange(len(places)), places % cached.shape[1]].set(x[:, 0])


def seen_slots(places: jax.Array, slots: int) -> jax.Array:
    """Returns a mask of the slots that hold a token, `(batch, slots)`, given the position of each sequence's latest
    token, `(batch,)`."""
    return _places_of_slots(places, slots) >= 0


def _places_of_slots(latest: jax.Array, slots: int) -> jax.Array:
    """Returns the position of the token in each slot, `(batch, slots)`; negative if the slot is still empty."""
    return latest[:, None] - (latest[:, None] - jnp.arange(slots)) % slots
