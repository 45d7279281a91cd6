"""Keys and values of the tokens that came before, so that the next token computes only its own.

A cache is a ring of slots: the token at place p of its sequence is in slot `p % slots`. With as many slots as tokens no
slot is used twice; with a window of attention, `window` slots hold all that a token may see.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class Calls:
    """Counts the calls of a module while a program is traced. Compared by identity, as it is static.

    Attributes:
        count: of the calls so far.
    """

    def __init__(self) -> None:
        self.count = 0


class Cache(nnx.Variable):
    """The keys, or the values, of one attention layer: `(batch, slots, kv_heads, head_dim)`, in a `Stack` with a
    leading dimension of layers. Sharded over the batch axes and the tensor axis.

    `gtp_jax.generate` gives caches to a copy of a model, and reads what its calls wrote. Metadata `filled` says whether
    it holds tokens: then a call adds one token to each sequence; otherwise a call begins the sequences. `calls` counts
    the calls of its module.
    """


def filled_from(x: jax.Array, places: jax.Array, slots: int) -> jax.Array:
    """Returns the cache of sequences that begin with this call.

    Args:
        x: `(batch, sequence, kv_heads, head_dim)`, keys or values.
        places: `(batch, sequence)`, 0, 1, ... up to the last token of each row, which padding behind it repeats.
        slots: how many there are.
    """
    length = x.shape[1]
    if slots >= length:  # padding lies in slots that later tokens overwrite before they see them
        return jnp.pad(x, ((0, 0), (0, slots - length), (0, 0), (0, 0)))
    kept = jnp.maximum(_places_of_slots(places[:, -1], slots), 0)
    return jnp.take_along_axis(x, kept[..., None, None], axis=1)


def with_token(cached: jax.Array, x: jax.Array, places: jax.Array) -> jax.Array:
    """Returns the cache with one more token in each sequence.

    Args:
        cached: `(batch, slots, kv_heads, head_dim)`.
        x: `(batch, 1, kv_heads, head_dim)`.
        places: `(batch,)`, of the tokens in their sequences.
    """
    return cached.at[jnp.arange(len(places)), places % cached.shape[1]].set(x[:, 0])


def seen_slots(places: jax.Array, slots: int) -> jax.Array:
    """Returns which slots hold a token, `(batch, slots)`, where the latest token is at these places."""
    return _places_of_slots(places, slots) >= 0


def _places_of_slots(latest: jax.Array, slots: int) -> jax.Array:
    """Returns the place of the token that is in each slot, `(batch, slots)`; below 0 where there is none yet."""
    return latest[:, None] - (latest[:, None] - jnp.arange(slots)) % slots
