"""Checks ids in a vocabulary: one outside raises an error if the ids are concrete, and gives NaN inside a program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def check_ids(
    ids: jax.typing.ArrayLike, vocab_size: int, *, name: str = "tokens", ignore_negative: bool = False
) -> None:
    """Raises an error if ids are outside a vocabulary.

    A program under `jax.jit` cannot raise errors. There, `Embed` returns a row of NaN for such a token, and
    `cross_entropy` a loss of NaN for such a target. Call this function on the batch of a step whose loss is NaN, or on
    every batch before its step.

    Args:
        ids: a concrete (not traced) array of integers. If it is on several hosts, each process checks its own shards.
        vocab_size: the size of the vocabulary. Ids must be at least 0 and below this.
        name: the name of the ids in error messages.
        ignore_negative: whether to accept negative ids, as `cross_entropy` does for targets that it leaves out.

    Raises:
        ValueError: if an id is outside the vocabulary; the message names the first one, its position and how many more
            there are in the array or, on several hosts, in the shard.
        TypeError: if `ids` are not integers, or are traced.
    """
    if isinstance(ids, Tracer):
        raise TypeError(
            f"`{name}` is traced and has no values yet; call `gtp_jax.ops.check_ids` on the batch outside of `jax.jit`."
        )
    if not jnp.issubdtype(jnp.result_type(ids), jnp.integer):
        raise TypeError(f"`{name}` must be ids, which are integers; got {jnp.result_type(ids)}.")
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


def check_concrete_ids(ids: jax.typing.ArrayLike, vocab_size: int, *, name: str, ignore_negative: bool = False) -> None:
    """Calls `check_ids` if the ids are concrete; does nothing while a program is traced."""
    if not isinstance(ids, Tracer):
        check_ids(ids, vocab_size, name=name, ignore_negative=ignore_negative)


def not_ids(owner: str, ids: Any) -> str:
    """Returns the message for an embedding that is given an array whose elements are not integers.

    Args:
        owner: the embedding, as the message names it.
        ids: the array.
    """
    return (
        f"{owner} takes token ids, which are integers; got {ids.dtype} of shape {tuple(ids.shape)}. Make ids integers "
        "where the batch is made, or pass `ids.astype(jnp.int32)`."
    )


def to_index(ids: jax.Array) -> jax.Array:
    """Returns ids in a signed type of at least 32 bits, in which they can be compared with the size of any array.

    Unsigned ids that are too large for that type become its largest number, which is outside any vocabulary.
    """
    # JAX promotes uint64 and int32 to a float
    dtype = jnp.int64 if ids.dtype == jnp.uint64 else jnp.promote_types(ids.dtype, jnp.int32)
    if jnp.issubdtype(ids.dtype, jnp.unsignedinteger):
        ids = jnp.minimum(ids, min(jnp.iinfo(ids.dtype).max, jnp.iinfo(dtype).max))
    return ids.astype(dtype)


def _parts(ids: Any) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """Returns the parts of an array that are on this host, each with the position of its first element."""
    if isinstance(ids, jax.Array) and not ids.is_fully_addressable:
        shards = ids.addressable_shards
        return [(tuple(i.start or 0 for i in shard.index), np.asarray(shard.data)) for shard in shards]
    whole = np.asarray(ids)
    return [((0,) * whole.ndim, whole)]
