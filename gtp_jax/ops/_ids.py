"""Ids in a vocabulary: those outside are an error where their values are at hand, and NaN inside a program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def check_ids(ids: Any, vocab_size: int, *, name: str = "tokens", ignore_negative: bool = False) -> None:
    """Refuses ids outside a vocabulary.

    A program under `jax.jit` cannot raise, so there `Embed` gives such a token a row of NaN and `cross_entropy` such a
    target a loss of NaN. Call this on the batch of a step whose loss is NaN, or on every batch ahead of its step.

    Args:
        ids: an array of integers with values, not one that is being traced. Of an array on several hosts each process
            checks its own shards.
        vocab_size: ids are at least 0 and below this.
        name: what messages call the ids.
        ignore_negative: accept negative ids, as targets may have: `cross_entropy` leaves them out.

    Raises:
        ValueError: naming the first id outside the vocabulary, its position and how many there are.
        TypeError: if `ids` are not integers, or are being traced.
    """
    if isinstance(ids, Tracer):
        raise TypeError(
            f"`{name}` is traced and has no values yet; call `gtp_jax.check_ids` on the batch outside of `jax.jit`."
        )
    if not jnp.issubdtype(jnp.result_type(ids), jnp.integer):
        raise TypeError(f"`{name}` are ids, integers; got {jnp.result_type(ids)}.")
    for first, part in _parts(ids):
        outside = (part >= vocab_size) if ignore_negative else (part >= vocab_size) | (part < 0)
        if not outside.any():
            continue
        index = tuple(int(i) for i in np.argwhere(outside)[0])
        position = tuple(i + start for i, start in zip(index, first, strict=True))
        more = int(outside.sum()) - 1
        also = f", and {more} more" if more else ""
        allowed = "; negative ones are left out" if ignore_negative else ""
        raise ValueError(
            f"`{name}` has the id {int(part[index])} at position {position}{also}: outside the vocabulary of "
            f"{vocab_size}. Ids are 0 to {vocab_size - 1}{allowed}."
        )


def check_concrete_ids(ids: Any, vocab_size: int, *, name: str, ignore_negative: bool = False) -> None:
    """Calls `check_ids` where ids have values; inside a program does nothing."""
    if not isinstance(ids, Tracer):
        check_ids(ids, vocab_size, name=name, ignore_negative=ignore_negative)


def to_index(ids: jax.Array) -> jax.Array:
    """Returns ids in a signed type of at least 32 bits, in which every size of an array can be compared with them.

    Unsigned ids too large for it become its largest number, which is outside every vocabulary.
    """
    dtype = jnp.promote_types(ids.dtype, jnp.int32)
    if jnp.issubdtype(ids.dtype, jnp.unsignedinteger):
        ids = jnp.minimum(ids, min(jnp.iinfo(ids.dtype).max, jnp.iinfo(dtype).max))
    return ids.astype(dtype)


def _parts(ids: Any) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """Returns the parts of an array that are on this host, each behind the position of its first element."""
    if isinstance(ids, jax.Array) and not ids.is_fully_addressable:
        shards = ids.addressable_shards
        return [(tuple(i.start or 0 for i in shard.index), np.asarray(shard.data)) for shard in shards]
    whole = np.asarray(ids)
    return [((0,) * whole.ndim, whole)]
