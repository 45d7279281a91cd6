"""Tokens to the ranks whose experts they chose, and partial sums back. Called inside a `shard_map`.

A token travels once to each rank that has an expert of its choice, however many it chose there, and one partial sum
comes back. Ranks know each other's choices from one all-gather of integers, which tells counts and places to all, so
that none are exchanged. Of what arrives nothing need be kept for backward, which sends it again.

[Note: bounds]
XLA's arrays have fixed sizes: what arrives lies in an array for the worst case, in which every token chooses this rank:
`ranks * tokens` rows. It is transient: with the rows that experts multiply, which `gtp_jax.ops.in_rounds` bounds, the
worst case would be `min(top_k, experts of a rank)` times as many.
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
    """Where this rank's tokens go, and where the ones that come lie.

    Attributes:
        goes: bool `(ranks, tokens)`: which of this rank's tokens go to each rank.
        number: int32 `(ranks, tokens)`: the number of each among the tokens that go there.
        comes: bool `(ranks, tokens)`: which tokens of each rank come here.
        counts: int32 `(ranks, ranks)`: how many tokens go from the first to the second.
        axis: the ranks'.
        transport: how they travel.
        most_ranks: to how many ranks a token goes at most.
    """

    goes: jax.Array
    number: jax.Array
    comes: jax.Array
    counts: jax.Array
    axis: str
    transport: Transport
    most_ranks: int

    def of_rows(self, table: Shaped[jax.Array, "ranks tokens choices"]) -> jax.Array:
        """Returns, of a value for each token of each rank, that of every row that `dispatch` returns: `(ranks * tokens,
        choices)`. Of rows that no token has it is any token's: see `real`."""
        flat = jnp.reshape(table, (-1, table.shape[-1]))
        return flat if self.transport == "gather" else flat[self._tokens_of_rows]

    @property
    def real(self) -> Bool[jax.Array, " rows"]:
        """Says which rows are tokens that chose an expert of this rank."""
        ranks, tokens = self.comes.shape
        if self.transport == "gather":
            return jnp.reshape(self.comes, -1)
        come = self.counts[:, lax.axis_index(self.axis)]
        if self.transport == "padded":
            return jnp.reshape(jnp.arange(tokens) < come[:, None], -1)
        return jnp.arange(ranks * tokens) < jnp.sum(come)

    @property
    def _tokens_of_rows(self) -> jax.Array:
        """The number of the token in each row, counted over all ranks' tokens."""
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
    """Returns all ranks' choices, from numbers of experts among those of all ranks."""
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
        every: all ranks' choices.
        axis: the mesh axis of the ranks.
        experts: of each rank.
        transport: how tokens travel.
        most_ranks: how many ranks have experts of one token at most.
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
    """Returns the tokens that chose an expert of this rank, rank after rank, in `ranks * tokens` rows, of which
    `journey.real` says which are any; and a turn that follows their arrival.

    Its gradient is `combine`: so gradients travel in their own dtype, and are added in float32 in order of rank.

    Args:
        x: this rank's tokens.
        turn: ahead of which none is sent.
        journey: where they go.
    """
    return _dispatch(x, turn, journey)


def dispatch_codes(x: SlottedRows, turn: Turn, journey: Journey) -> tuple[SlottedRows, Turn]:
    """Returns what `dispatch` returns, of tokens of which only the codes travel, each row's scales behind its codes.
    Gradients travel as `dispatch`'s do.

    Args:
        x: this rank's tokens, whose codes have the same scale on all ranks, or scales of their own.
        turn: ahead of which none is sent.
        journey: where they go.
    """
    codes, scales = x.codes.codes, x.codes.scales
    wire = codes if scales is None else jnp.concatenate([codes, scales], axis=1)
    arrived, slot, turn = _dispatch_codes(wire, x.slot, turn, journey)
    if scales is not None:
        codes, scales = arrived[:, : codes.shape[1]], arrived[:, codes.shape[1] :]
    else:
        codes = arrived
    return SlottedRows(with_rows(x.codes, codes, scales), slot), turn


@jax.custom_vjp
def combine(
    partial_sums: Float[jax.Array, "rows features"], turn: Turn, journey: Journey
) -> tuple[Float[jax.Array, "tokens features"], Turn]:
    """Returns the sum of each token's rows on all ranks, which travel in their own dtype and are added in float32, in
    order of rank. Its gradient is `dispatch`, which waits for that of the turn it returns. Forward waits for none.

    Args:
        partial_sums: in the order of what `dispatch` returned; zeros in rows that are no token's.
        turn: of which gradients follow the arrival of this one's gradients.
        journey: the same.
    """
    return _combine(partial_sums, journey), turn


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather_shares(shares: Float[jax.Array, "tokens choices"], axis: str) -> Float[jax.Array, "ranks tokens choices"]:
    """Returns all ranks' shares. Gradients travel back in an all-to-all: each is one rank's alone, and XLA would join a
    reduce-scatter with those of weights, which have more time."""
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
    """Returns the rows that come here."""
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
    """Returns this rank's rows of all ranks: `(ranks, tokens, features)`, or as `_ragged` leaves them."""
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
    """Returns, for each rank, the tokens that go there, ahead of any others: `(ranks, tokens)`."""
    ranks, tokens = journey.goes.shape
    place = jnp.where(journey.goes, journey.number, tokens)
    every = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (ranks, tokens))
    return jnp.zeros_like(every).at[jnp.arange(ranks)[:, None], place].set(every, mode="drop")


def _flat_senders(journey: Journey) -> jax.Array:
    """Returns the tokens that are sent, rank after rank."""
    ranks, tokens = journey.goes.shape
    going = jnp.sum(journey.goes, axis=1, dtype=jnp.int32)
    place = jnp.where(journey.goes, (jnp.cumsum(going) - going)[:, None] + journey.number, ranks * tokens)
    every = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (ranks, tokens))
    return jnp.zeros(tokens * journey.most_ranks, jnp.int32).at[jnp.ravel(place)].set(jnp.ravel(every), mode="drop")


def _ragged(rows: jax.Array, room: int, counts: jax.Array, axis: str) -> jax.Array:
    """Sends runs of rows, of which this rank's lie one after another in order of rank, into `room` rows.

    Args:
        rows: what is sent.
        room: rows of the result, zeros where nothing arrives.
        counts: `(ranks, ranks)`: rows from the first to the second.
        axis: the ranks'.
    """
    rank = lax.axis_index(axis)
    sizes, arriving = counts[rank], counts[:, rank]
    starts = jnp.cumsum(sizes) - sizes
    there = (jnp.cumsum(counts, axis=0) - counts)[rank]  # behind what lower ranks send there
    out = jnp.zeros((room, *rows.shape[1:]), rows.dtype)
    return lax.ragged_all_to_all(rows, out, starts, sizes, there, arriving, axis_name=axis)
