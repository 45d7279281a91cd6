"""Sends tokens to the ranks whose experts they chose, and partial sums back. Called inside a `shard_map`.

A token travels once to each rank that has an expert it chose, however many it chose there, and one partial sum comes
back. One all-gather of integers gives every rank all choices; from them each rank computes all counts and positions, so
these need not be exchanged. Nothing that arrives has to be saved for backward, because backward sends it again.

[Note: bounds]
XLA's arrays have fixed sizes. Tokens therefore arrive in an array for the worst case, in which every token chooses this
rank: `ranks * tokens` rows. The array is transient. The rows that experts multiply are bounded by
`gtp_jax.ops.in_rounds`; their worst case would be `min(top_k, experts of a rank)` times as many.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int32, Shaped

from ..collectives import Turn, all_gather, in_bits, no_turn, tied, turn_after
from ..ops import SlottedRows, save_routing, with_rows
from ._transports import Transport


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("goes", "number", "comes", "counts"),
    meta_fields=("axis", "transport", "most_ranks"),
)
@dataclasses.dataclass(frozen=True)
class Journey:
    """Where this rank's tokens go, and in which rows tokens arrive here.

    Attributes:
        goes: bool `(ranks, tokens)`: which of this rank's tokens go to each rank.
        number: int32 `(ranks, tokens)`: the index of each token among those that go to the same rank.
        comes: bool `(ranks, tokens)`: which tokens of each rank come here.
        counts: int32 `(ranks, ranks)`: how many tokens go from the first rank to the second.
        axis: the mesh axis of the ranks.
        transport: how tokens travel.
        most_ranks: the most ranks that a token can go to.
    """

    goes: jax.Array
    number: jax.Array
    comes: jax.Array
    counts: jax.Array
    axis: str
    transport: Transport
    most_ranks: int

    def of_rows(self, table: Shaped[jax.Array, "ranks tokens choices"]) -> jax.Array:
        """Returns the table's values for the token in each row that `dispatch` returns: `(ranks * tokens, choices)`.

        Rows without a token hold arbitrary values; mask them with `real`.
        """
        flat = jnp.reshape(table, (-1, table.shape[-1]))
        return flat if self.transport == "gather" else flat[self._tokens_of_rows]

    @property
    def real(self) -> Bool[jax.Array, " rows"]:
        """Which rows hold tokens that chose an expert of this rank."""
        ranks, tokens = self.comes.shape
        if self.transport == "gather":
            return jnp.reshape(self.comes, -1)
        come = self.counts[:, lax.axis_index(self.axis)]
        if self.transport == "padded":
            return jnp.reshape(jnp.arange(tokens) < come[:, None], -1)
        return jnp.arange(ranks * tokens) < jnp.sum(come)

    @property
    def _tokens_of_rows(self) -> jax.Array:
        """The index of the token in each row, counted over the tokens of all ranks."""
        ranks, tokens = self.comes.shape
        number = jnp.cumsum(self.comes, axis=1, dtype=jnp.int32) - 1
        starts = jnp.arange(ranks, dtype=jnp.int32) * tokens
        if self.transport == "ragged":
            come = self.counts[:, lax.axis_index(self.axis)]
            starts = jnp.cumsum(come, dtype=jnp.int32) - come
        place = jnp.where(self.comes, starts[:, None] + number, ranks * tokens)
        every = jnp.arange(ranks * tokens, dtype=jnp.int32)
        return jnp.zeros_like(every).at[jnp.ravel(place)].set(every, mode="drop")


def gather_choices(chosen: Int32[jax.Array, "tokens choices"], axis: str) -> Int32[jax.Array, "ranks tokens choices"]:
    """Returns the choices of all ranks. Experts are numbered over all ranks."""
    return save_routing(lax.all_gather(chosen, axis))


def plan_journey(
    every: Int32[jax.Array, "ranks tokens choices"],
    axis: str,
    experts: int,
    transport: Transport,
    most_ranks: int,
) -> Journey:
    """Returns where tokens go.

    Args:
        every: the choices of all ranks.
        axis: the mesh axis of the ranks.
        experts: the number of experts per rank.
        transport: how tokens travel.
        most_ranks: the most ranks that a single token's experts can be on.
    """
    ranks, rank = every.shape[0], lax.axis_index(axis)
    of_rank = jnp.arange(ranks)[:, None, None]
    owners = every // experts
    to = jnp.any(owners[:, None] == of_rank, axis=-1)  # (from, to, tokens)
    goes = to[rank]
    number = jnp.cumsum(goes, axis=1, dtype=jnp.int32) - 1
    counts = jnp.sum(to, axis=-1, dtype=jnp.int32)
    return Journey(goes, number, to[:, rank], counts, axis, transport, most_ranks)


@jax.custom_vjp
def dispatch(
    x: Float[jax.Array, "tokens features"], turn: Turn, journey: Journey
) -> tuple[Float[jax.Array, "rows features"], Turn]:
    """Returns the tokens that chose an expert of this rank, in order of rank, and a turn that follows their arrival.

    The result has `ranks * tokens` rows; `journey.real` marks those that hold a token. The gradient is `combine`, so
    gradients travel in their own dtype and are added in float32, in order of rank.

    Args:
        x: this rank's tokens.
        turn: the turn before which no token is sent.
        journey: where the tokens go.
    """
    return _dispatch(x, turn, journey)


def dispatch_codes(x: SlottedRows, turn: Turn, journey: Journey) -> tuple[SlottedRows, Turn]:
    """Dispatches tokens like `dispatch`, but sends only their codes, followed in each row by the row's scales if it has
    any. Gradients travel as in `dispatch`.

    Args:
        x: this rank's tokens. Their codes have either one scale that is the same on all ranks, or scales per row.
        turn: the turn before which no token is sent.
        journey: where the tokens go.
    """
    codes, scales = x.codes.codes, x.codes.scales
    wire = codes if scales is None else jnp.concatenate([codes, _as_bytes(scales)], axis=1)
    arrived, slot, turn = _dispatch_codes(wire, x.slot, turn, journey)
    if scales is not None:
        codes, scales = arrived[:, : codes.shape[1]], _from_bytes(arrived[:, codes.shape[1] :], scales.dtype)
    else:
        codes = arrived
    return SlottedRows(with_rows(x.codes, codes, scales), slot), turn


def _as_bytes(scales: jax.Array) -> jax.Array:
    """Returns the bytes of scales `(rows, blocks)`, uint8 `(rows, bytes)`."""
    if scales.dtype == jnp.uint8:
        return scales
    return jnp.reshape(
        lax.bitcast_convert_type(scales, jnp.uint8), (len(scales), scales.shape[1] * scales.dtype.itemsize)
    )


def _from_bytes(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns scales from their bytes: the inverse of `_as_bytes`."""
    if dtype == jnp.uint8:
        return x
    size = jnp.dtype(dtype).itemsize
    return lax.bitcast_convert_type(jnp.reshape(x, (len(x), x.shape[1] // size, size)), dtype)


@jax.custom_vjp
def combine(
    partial_sums: Float[jax.Array, "rows features"], turn: Turn, journey: Journey
) -> tuple[Float[jax.Array, "tokens features"], Turn]:
    """Returns the sum of each token's rows on all ranks, and `turn`.

    Rows travel in their own dtype and are added in float32, in order of rank. The gradient is `dispatch`, which waits
    for the gradient of the returned turn. Forward does not wait for a turn.

    Args:
        partial_sums: the partial sums, in the order of the rows that `dispatch` returned; zeros in rows without a
            token.
        turn: a turn whose gradient follows the arrival of the gradients that are dispatched here.
        journey: the journey that was given to `dispatch`.
    """
    return _combine(partial_sums, journey), turn


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather_shares(shares: Float[jax.Array, "tokens choices"], axis: str) -> Float[jax.Array, "ranks tokens choices"]:
    """Returns the shares of all ranks.

    Gradients travel back in an all-to-all, because only one rank contributes to the gradient of each share, and because
    XLA would merge a reduce-scatter with those of weights, which are less urgent.
    """
    return lax.all_gather(shares, axis)


def _shares_fwd(shares: jax.Array, axis: str):
    return lax.all_gather(shares, axis), None


def _shares_bwd(axis: str, _: None, gradient: jax.Array):
    back = lax.all_to_all(gradient, axis, split_axis=0, concat_axis=0, tiled=True)
    return (functools.reduce(lax.add, list(back)),)


gather_shares.defvjp(_shares_fwd, _shares_bwd)


def _dispatch(x: jax.Array, turn: Turn, journey: Journey) -> tuple[jax.Array, Turn]:
    arrived = in_bits(_to_experts, tied(x, turn), journey)
    return arrived, turn_after(arrived)


def _to_experts(x: jax.Array, journey: Journey) -> jax.Array:
    """Returns the rows that arrive here."""
    axis = journey.axis
    ranks, tokens = journey.goes.shape
    if journey.transport == "gather":
        arrived = all_gather(x[None], axis, dim=0)
    elif journey.transport == "padded":
        arrived = lax.all_to_all(x[_senders(journey)], axis, split_axis=0, concat_axis=0, tiled=True)
    else:
        arrived = _ragged(x[_flat_senders(journey)], ranks * tokens, journey.counts, axis)
    return jnp.reshape(arrived, (ranks * tokens, *x.shape[1:]))


def _combine(partial_sums: jax.Array, journey: Journey) -> jax.Array:
    back, ranks = in_bits(_from_experts, partial_sums, journey), journey.goes.shape[0]
    if journey.transport == "ragged":
        going = jnp.sum(journey.goes, axis=1, dtype=jnp.int32)
        places = (jnp.cumsum(going) - going)[:, None] + journey.number
        parts = [back[jnp.where(journey.goes[rank], places[rank], 0)] for rank in range(ranks)]
    elif journey.transport == "gather":
        parts = list(back)
    else:
        parts = [back[rank, jnp.where(journey.goes[rank], journey.number[rank], 0)] for rank in range(ranks)]
    dtype = partial_sums.dtype
    wide = jnp.promote_types(dtype, jnp.float32)
    own = [jnp.where(journey.goes[rank][:, None], part.astype(wide), 0) for rank, part in enumerate(parts)]
    return functools.reduce(lax.add, own).astype(dtype)


def _from_experts(rows: jax.Array, journey: Journey) -> jax.Array:
    """Returns the rows of this rank's tokens from all ranks: `(ranks, tokens, features)`, or as `_ragged` does."""
    ranks, tokens = journey.goes.shape
    if journey.transport == "ragged":
        return _ragged(rows, tokens * journey.most_ranks, journey.counts.T, journey.axis)
    blocks = jnp.reshape(rows, (ranks, tokens, *rows.shape[1:]))
    return lax.all_to_all(blocks, journey.axis, split_axis=0, concat_axis=0, tiled=True)


def _dispatch_fwd(x: jax.Array, turn: Turn, journey: Journey):
    return _dispatch(x, turn, journey), journey


def _dispatch_bwd(journey: Journey, gradients: tuple[jax.Array, Turn]):
    return _combine(gradients[0], journey), no_turn(), None


@jax.custom_vjp
def _dispatch_codes(
    codes: jax.Array, slot: jax.Array, turn: Turn, journey: Journey
) -> tuple[jax.Array, jax.Array, Turn]:
    return _codes_and_slot(codes, slot, turn, journey)


def _codes_and_slot(
    codes: jax.Array, slot: jax.Array, turn: Turn, journey: Journey
) -> tuple[jax.Array, jax.Array, Turn]:
    arrived, turn = _dispatch(codes, turn, journey)
    return arrived, jnp.zeros((arrived.shape[0], slot.shape[1]), slot.dtype), turn


def _dispatch_codes_fwd(codes: jax.Array, slot: jax.Array, turn: Turn, journey: Journey):
    return _codes_and_slot(codes, slot, turn, journey), journey


def _dispatch_codes_bwd(journey: Journey, gradients: tuple[jax.Array, jax.Array, Turn]):
    return None, _combine(gradients[1], journey), no_turn(), None


def _combine_fwd(partial_sums: jax.Array, turn: Turn, journey: Journey):
    return (_combine(partial_sums, journey), turn), journey


def _combine_bwd(journey: Journey, gradients: tuple[jax.Array, Turn]):
    return *_dispatch(*gradients, journey), None


dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)
_dispatch_codes.defvjp(_dispatch_codes_fwd, _dispatch_codes_bwd)
combine.defvjp(_combine_fwd, _combine_bwd)


def _senders(journey: Journey) -> jax.Array:
    """Returns the indices of the tokens that go to each rank, `(ranks, tokens)`; after them come arbitrary indices."""
    ranks, tokens = journey.goes.shape
    place = jnp.where(journey.goes, journey.number, tokens)
    every = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (ranks, tokens))
    return jnp.zeros_like(every).at[jnp.arange(ranks)[:, None], place].set(every, mode="drop")


def _flat_senders(journey: Journey) -> jax.Array:
    """Returns the indices of the tokens that are sent, in order of the receiving rank."""
    ranks, tokens = journey.goes.shape
    going = jnp.sum(journey.goes, axis=1, dtype=jnp.int32)
    place = jnp.where(journey.goes, (jnp.cumsum(going) - going)[:, None] + journey.number, ranks * tokens)
    every = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (ranks, tokens))
    return jnp.zeros(tokens * journey.most_ranks, jnp.int32).at[jnp.ravel(place)].set(jnp.ravel(every), mode="drop")


def _ragged(rows: jax.Array, room: int, counts: jax.Array, axis: str) -> jax.Array:
    """Sends a run of rows to each rank, and returns the rows that arrive here, in order of the sending rank.

    Args:
        rows: the rows to send: the runs one after another, in order of the receiving rank.
        room: the number of rows of the result; rows to which nothing is sent are zeros.
        counts: `(ranks, ranks)`: how many rows go from the first rank to the second.
        axis: the mesh axis of the ranks.
    """
    rank = lax.axis_index(axis)
    sizes, arriving = counts[rank], counts[:, rank]
    starts = jnp.cumsum(sizes) - sizes
    there = (jnp.cumsum(counts, axis=0) - counts)[rank]  # after the rows that lower ranks send there
    out = jnp.zeros((room, *rows.shape[1:]), rows.dtype)
    return lax.ragged_all_to_all(rows, out, starts, sizes, there, arriving, axis_name=axis)
