"""The exchanges of context parallelism around attention, as in DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv
2309.14509). Called inside a `shard_map`.

Between layers, each rank of the axis has a part of every sequence. Attention needs whole sequences, and computes each
head on its own. So ranks exchange: before attention, each receives the whole sequences of a part of the heads; after
it, its own part of the sequence of all heads. One rank sends `(ranks - 1) / ranks` of its part, whatever the number of
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Shaped

from .._words import SEQUENCE_EXCHANGES, SequenceExchange
from ..mesh import degree
from ._turns import in_turn, turn_in_scope


def check_sequence_exchange(exchange: Any) -> None:
    """Raises a `ValueError` if this is not a `SequenceExchange` or `None`."""
    if exchange not in (None, *SEQUENCE_EXCHANGES):
        raise ValueError(f"`sequence_exchange` is {exchange!r}; it must be 'heads', 'keys' or None.")


def exchange_of(asked: SequenceExchange | None, heads: int, kv_heads: int, axis: str) -> SequenceExchange:
    """Returns what ranks exchange. By default, heads if the numbers of heads of a rank allow it, otherwise keys."""
    ranks = degree(axis)
    fit = heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)
    return asked or ("heads" if fit else "keys")


def whole_sequences_of(q: jax.Array, k: jax.Array, v: jax.Array, axis: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries, keys and values as `whole_sequences` does: in one launch, or in two if keys and values are of
    other sequences than queries.

    Raises:
        ValueError: if the axis does not divide the query heads, or for the reason of `whole_sequences`.
    """
    if (heads := q.shape[2]) % degree(axis):
        raise ValueError(
            f"{axis} = {degree(axis)} does not divide the {heads} query heads of a rank, which it divides for "
            "attention. Choose a degree that does, or pass `sequence_exchange='keys'`."
        )
    if k.shape[:2] == q.shape[:2]:
        q, k, v = whole_sequences([q, k, v], axis)
    else:
        ((q,), (k, v)) = whole_sequences([q], axis), whole_sequences([k, v], axis)
    return q, k, v


def whole_sequences(
    parts: Sequence[Shaped[jax.Array, "batch part _ head_dim"]], axis: str
) -> list[Shaped[jax.Array, "batch sequence _ head_dim"]]:
    """Returns, for each array `(batch, sequence / ranks, heads, head_dim)`, the whole sequences of a part of its heads:
    `(batch, sequence, heads / ranks, head_dim)`. Sends all arrays in one launch, in the turn of the layer.

    If there are more ranks than heads, each head is sent to the ranks whose number, in units of ranks per head, is that
    of the head; the result then has one head.

    Args:
        parts: the arrays, which differ at most in their numbers of heads.
        axis: the mesh axis.

    Raises:
        ValueError: if a number of heads neither divides the number of ranks nor is divisible by it.
    """
    ranks = degree(axis)
    by_rank = [_by_rank(x, ranks, axis) for x in parts]
    ends = [0]
    for x in by_rank:
        ends.append(ends[-1] + x.shape[3])
    sent = in_turn(jnp.concatenate(by_rank, axis=3), turn_in_scope())
    got = lax.all_to_all(sent, axis, split_axis=2, concat_axis=1, tiled=True)[:, :, 0]
    return [got[:, :, start:stop] for start, stop in zip(ends, ends[1:], strict=False)]


def parts_of_sequences(
    y: Shaped[jax.Array, "batch sequence _ head_dim"], axis: str
) -> Shaped[jax.Array, "batch part heads head_dim"]:
    """Returns this rank's part of the sequence of all heads, `(batch, sequence / ranks, heads, head_dim)`, given the
    whole sequences of its part of the heads, `(batch, sequence, heads / ranks, head_dim)`."""
    return lax.all_to_all(y, axis, split_axis=1, concat_axis=2, tiled=True)


def _by_rank(x: jax.Array, ranks: int, axis: str) -> jax.Array:
    """Returns `(batch, sequence, ranks, heads of a rank, head_dim)`."""
    heads = x.shape[2]
    if heads % ranks and ranks % heads:
        raise ValueError(
            f"{heads} heads on each rank are to be divided over {axis} = {ranks} for attention; one number must divide "
            "the other. Choose another degree, or pass `sequence_exchange='keys'`."
        )
    if heads < ranks:
        wide = jnp.promote_types(x.dtype, jnp.float32)  # in which the gradients of copies are summed
        x = jnp.repeat(x.astype(wide), ranks // heads, axis=2).astype(x.dtype)
    return jnp.reshape(x, (*x.shape[:2], ranks, -1, x.shape[3]))
