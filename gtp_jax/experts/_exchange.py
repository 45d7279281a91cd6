"""Exchanges tokens between the ranks that divide the experts of a mixture."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..collectives import Turn, in_turn, no_turn, tied, turn_after, turn_in_scope
from ..formats import QuantizedArray
from ..nn import apply_gathered
from ..ops import (
    SlottedRows,
    SlottedWeight,
    in_rounds,
    save_activation,
    save_for_backward,
    save_routing,
    shares_of_places,
    weighted_glu,
    window_of,
    with_rows,
)
from ._grouped import GroupedDense
from ._tokens import Journey, combine, dispatch, dispatch_codes, gather_choices, gather_shares, plan_journey
from ._transports import Transport, choose_transport

# The number of rows per round is a multiple of this.
_TILE = 16

# The collectives by which tokens and weights arrive.
_TRAVELS = ("all_gather", "all_to_all", "ragged_all_to_all")

# The primitives that bring tokens to their experts: the collectives, and those before and after them, for instance to
# append scales to codes. Also those that create the slots of codes, which are zeros.
_MOVES = (
    "gather",
    "gtp_take",
    *_TRAVELS,
    "reshape",
    "concatenate",
    "bitcast_convert_type",
    "optimization_barrier",
    "slice",
    "broadcast_in_dim",
)


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """A chunk of every rank's tokens: where they go, and the order in which this rank multiplies those that arrive.

    A choice is a pair of an arrived row and one of its experts. Its place is its position after sorting by expert.

    Attributes:
        start: the index of the first token of the chunk, on each rank.
        stop: the index after the last token of the chunk.
        journey: where the tokens go.
        size: the number of places per round.
        whole: whether one round is enough for any load.
        order: int32 `(rows * top_k,)`: the choices sorted by expert; those of no expert of this rank are last.
        places: int32 `(rows, top_k)`: the place of each choice.
        ends: int32 `(experts,)`: the place after the last choice of each expert.
    """

    start: int
    stop: int
    journey: Journey
    size: int
    whole: bool
    order: jax.Array
    places: jax.Array
    ends: jax.Array


def exchange(
    x: jax.Array,
    chosen: jax.Array,
    shares: jax.Array,
    up: GroupedDense,
    down: GroupedDense,
    activation: Callable[[jax.Array], jax.Array],
    *,
    axis: str,
    most_ranks: int,
    transport: Transport | None = None,
    round_size: float = 1.25,
    chunks: int = 1,
) -> jax.Array:
    """Returns each token's sum of its experts' outputs, weighted by its shares, with experts divided among ranks.

    Called in local view. A token is sent once to each rank that has experts it chose; choices and shares are
    all-gathered. Each rank sorts the arriving rows by expert, multiplies, weights and sums them, and sends the partial
    sums back. No token is dropped. If experts multiply in FP8 (also in blocks) or MXFP8, tokens are sent as codes, from
    which the operands of forward and of wgrad are made; partial sums and gradients travel in the dtype of `x`.

    [Note: chunks]
    Tokens are sent in chunks: while experts multiply one chunk, the next is in transit. In backward, the gradients of
    the sums are sent in the same way, and the tokens are sent again. So with n chunks, if experts multiply for longer
    than a chunk travels, only the first dispatch and the last combine are exposed, each an n-th of the data. Turns keep
    XLA from sending all chunks in one launch.

    Args:
        x: the tokens, `(tokens, features)`, in the compute dtype.
        chosen: the experts of each token, int32 `(tokens, top_k)`.
        shares: the weights of each token's experts in its sum, `(tokens, top_k)`, in at least float32.
        up: the layer with the outputs `gate` and `up`.
        down: the second layer. The caller must sum the partial sums of tensor ranks.
        activation: the elementwise function applied to the gate.
        axis: the mesh axis whose ranks divide the experts.
        most_ranks: the most ranks that a single token's experts can be on.
        transport: how tokens travel; `None` for the default of `choose_transport`.
        round_size: the number of places per round, as a multiple of those that evenly loaded experts fill. If a rank's
            experts have more rows, the rank multiplies in several rounds.
        chunks: the number of equal chunks in which tokens are sent. If it does not divide the number of a rank's
            tokens, the greatest common divisor of both is used instead.
    """
    tokens = x.shape[0]
    transport = choose_transport(axis, transport)
    turn = turn_in_scope()
    every = gather_choices(tied(chosen, turn), axis)
    x, shares = in_turn(x, turn), in_turn(shares, turn)
    rows = up.in_codes(x, axis)
    chunks = math.gcd(tokens, chunks)
    size = tokens // chunks
    parts = [
        _chunk(every, start, start + size, up.own_experts, axis, most_ranks, transport, round_size)
        for start in range(0, tokens, size)
    ]
    keys = [(up.call_key(), down.call_key()) for _ in parts]

    def experts(up_weight: Any, down_weight: Any, x: jax.Array | SlottedRows, shares: jax.Array) -> list[jax.Array]:
        weights = up_weight, down_weight
        floats = [w.slot if isinstance(w, SlottedWeight) else w for w in weights]
        values = [w.values if isinstance(w, SlottedWeight) else None for w in weights]
        sums, turn = [], turn_after(every)
        for one, keys_of_one in zip(parts, keys, strict=True):
            rows, codes, turn = _dispatched(x, turn, one)
            # shares must travel no later than the first chunk: XLA may merge them with a later chunk, for which the
            # experts would then wait
            turn = tied(turn, turn_after(lax.stop_gradient(shares)))
            of_rows = one.journey.of_rows(shares[:, one.start : one.stop])
            operands = rows, of_rows, *floats
            constants = codes, one.order, one.places, one.ends, keys_of_one, values
            one_round = functools.partial(_one_round, up, down, activation, one.size)
            if one.whole:
                sums.append(one_round(0, operands, constants))
            else:
                rounds = jnp.maximum(1, -(-one.ends[-1] // one.size))
                sums.append(in_rounds(one_round, operands, constants, rounds))
        return sums

    def there(x: jax.Array | SlottedRows, shares: jax.Array) -> list[jax.Array]:
        return apply_gathered((up, down), experts, x, shares)

    # rows that have arrived are never saved for backward, but sent again, whatever else a layer saves
    partial_sums = jax.checkpoint(there, policy=_keeps, prevent_cse=False)(rows, gather_shares(shares, axis))
    sums, turn = [], no_turn()
    for one, partial in reversed(list(zip(parts, partial_sums, strict=True))):  # backward then starts with the first
        y, turn = combine(partial, turn, one.journey)
        sums.append(y)
    return save_for_backward(jnp.concatenate(sums[::-1]) if len(sums) > 1 else sums[0])


def _chunk(
    every: jax.Array,
    start: int,
    stop: int,
    experts: int,
    axis: str,
    most_ranks: int,
    transport: Transport,
    round_size: float,
) -> _Chunk:
    """Returns the chunk of the tokens from `start` up to, but not including, `stop` of each rank."""
    every = every[:, start:stop]
    ranks, tokens, top_k = every.shape
    journey = plan_journey(every, axis, experts, transport, most_ranks)
    # experts of other ranks, and all experts of rows without a token, get the number after this rank's last expert
    number = journey.of_rows(every) - lax.axis_index(axis) * experts
    number = jnp.where((number >= 0) & (number < experts) & journey.real[:, None], number, experts)
    order = save_routing(jnp.argsort(jnp.ravel(number), stable=True).astype(jnp.int32))
    inverse = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32))
    sizes = jnp.bincount(jnp.ravel(number), length=experts).astype(jnp.int32)
    size = places_of_round(tokens, top_k, ranks, experts, round_size)
    return _Chunk(
        start=start,
        stop=stop,
        journey=journey,
        size=size,
        whole=size == worst_case(tokens, top_k, ranks, experts),
        order=order,
        places=jnp.reshape(inverse, number.shape),
        ends=jnp.cumsum(sizes, dtype=jnp.int32),
    )


def _dispatched(x: jax.Array | SlottedRows, turn: Turn, one: _Chunk) -> tuple[jax.Array, QuantizedArray | None, Turn]:
    """Returns the rows of a chunk that arrive here, their codes, and the turn that follows.

    If tokens travel as codes, the slot is returned instead of the rows; otherwise the codes are `None`.
    """
    if not isinstance(x, SlottedRows):
        rows, turn = dispatch(x[one.start : one.stop], turn, one.journey)
        return rows, None, turn
    own, codes = slice(one.start, one.stop), x.codes
    part = with_rows(codes, codes.codes[own], None if codes.scales is None else codes.scales[own])
    rows, turn = dispatch_codes(SlottedRows(part, x.slot[own]), turn, one.journey)
    return rows.slot, rows.codes, turn


def _one_round(
    up: GroupedDense,
    down: GroupedDense,
    activation: Callable[[jax.Array], jax.Array],
    size: int,
    index: Any,
    operands: Any,
    constants: Any,
) -> jax.Array:
    """Returns the partial sums of the rows of one round; zeros for all other rows."""
    rows, shares, *floats = operands
    codes, order, places, ends, keys, values = constants
    weights = [f if v is None else SlottedWeight(v, f) for f, v in zip(floats, values, strict=True)]
    window = window_of(order, places, ends[-1], index * size, size)
    sizes = jnp.diff(jnp.clip(ends - index * size, 0, size), prepend=0)
    rows = rows if codes is None else SlottedRows(codes, rows)
    hidden = up.product_of(weights[0], rows, sizes, keys[0], window)
    weighted = weighted_glu(hidden["gate"], hidden["up"], shares_of_places(shares, window), activation)
    return down.product_of(weights[1], save_activation(weighted), sizes, keys[1], None, window)


def _keeps(primitive: Any, *_: Any, **params: Any) -> bool:
    if primitive.name == "custom_jvp_call":  # collectives may be wrapped in one, such as by `in_bits`
        return not any(eqn.primitive.name in _TRAVELS for eqn in params["call_jaxpr"].eqns)
    return params.get("target_name", primitive.name) not in _MOVES


def places_of_round(tokens: int, top_k: int, ranks: int, experts: int, round_size: float) -> int:
    """Returns how many rows a rank's experts multiply per round, which bounds how many are saved for backward.

    Args:
        tokens: the number of tokens per rank.
        top_k: the number of experts per token.
        ranks: the number of ranks that divide the experts.
        experts: the number of experts per rank.
        round_size: the size of a round as a multiple of an even share, which is `tokens * top_k` rows.
    """
    even = math.ceil(tokens * top_k * round_size)
    return min(-(-even // _TILE) * _TILE, worst_case(tokens, top_k, ranks, experts))


def worst_case(tokens: int, top_k: int, ranks: int, experts: int) -> int:
    """Returns how many rows a rank's experts multiply if every token chooses as many of them as it can."""
    return ranks * tokens * min(top_k, experts)


def check_chunks(chunks: object) -> None:
    """Refuses a number of chunks that is not a positive integer.

    Raises:
        ValueError: if `chunks` is anything else; the message names it.
    """
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise ValueError(f"`exchange_chunks` is {chunks!r}; it must be a whole number of at least 1, such as 2.")
