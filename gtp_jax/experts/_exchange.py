"""The experts of a mixture on the ranks that have them, with tokens exchanged."""

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

# Places of a round are a multiple of this.
_TILE = 16

# Collectives by which tokens and weights arrive.
_TRAVELS = ("all_gather", "all_to_all", "ragged_all_to_all")

# What brings tokens to their experts: ahead of the collectives, where scales are joined to codes, those, and behind
# them. And slots of codes, which are zeros.
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
    """Some of this rank's tokens, those of all ranks that come here, and the order of their rows.

    Attributes:
        start: the first of the tokens.
        stop: the one behind the last.
        journey: of the tokens.
        size: places of a round.
        whole: whether these are enough for any load.
        order: int32 `(rows * top_k,)`: choices in order of their experts; those of no expert of this rank are last.
        places: int32 `(rows, top_k)`: where in that order each choice is.
        ends: int32 `(experts,)`: behind the last choice of each expert.
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
    """Returns the sum of each token's experts, each times its share, of experts that are divided among ranks. Called in
    local view.

    A token is sent once to each rank that has experts of its choice, together with its choices and shares; there the
    rows are sorted by expert, multiplied, weighted and added up; partial sums travel back. No token is dropped. Where
    experts multiply in FP8 or MXFP8, tokens are sent as codes, of which forward's operand and wgrad's are made; all
    else is of `x`'s dtype.

    [Note: chunks]
    Tokens are sent chunk after chunk: while experts multiply one, the next is on its way. In backward likewise the
    gradients of sums, together with the tokens, which are sent again. So of n chunks a first dispatch and a last
    combine are waited for, an n-th of each. Turns keep XLA from sending all chunks in one launch.

    Args:
        x: `(tokens, features)`, of the compute dtype.
        chosen: int32 `(tokens, top_k)`.
        shares: float32 at least, likewise.
        up: of `gate` and `up`.
        down: partial sums of tensor ranks are left to the caller.
        activation: elementwise, on the gate.
        axis: of the ranks.
        most_ranks: how many of them have experts of one token at most.
        transport: how tokens travel; `None` for what the table says.
        round_size: places of a round, as a multiple of those that experts of equal load fill. Where a rank's experts
            have more, it multiplies in several rounds.
        chunks: parts of equal size in which tokens are sent; fewer, if so many do not divide a rank's tokens.
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
            # shares travel with the first chunk at the latest: XLA may join them with a later one, for which experts
            # would then wait
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

    # whatever else a layer keeps for backward, what has arrived is sent again
    partial_sums = jax.checkpoint(there, policy=_keeps, prevent_cse=False)(rows, gather_shares(shares, axis))
    sums, turn = [], no_turn()
    for one, partial in reversed(list(zip(parts, partial_sums, strict=True))):  # so that backward begins with the first
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
    """Returns where tokens `start` to `stop` of each rank go, and in which order this rank multiplies its own."""
    every = every[:, start:stop]
    ranks, tokens, top_k = every.shape
    journey = plan_journey(every, axis, experts, transport, most_ranks)
    # experts of other ranks, and rows that no token has, count as the one behind the last
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
    """Returns the rows of a chunk that come here, or their slot and their codes; and the turn that follows."""
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
    """Returns partial sums of a round's rows, zeros in all others."""
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
    if primitive.name == "custom_jvp_call":  # what travels as integers, or is gathered, with a derivative of its own
        return not any(eqn.primitive.name in _TRAVELS for eqn in params["call_jaxpr"].eqns)
    return params.get("target_name", primitive.name) not in _MOVES


def places_of_round(tokens: int, top_k: int, ranks: int, experts: int, round_size: float) -> int:
    """Returns the rows that experts of a rank multiply in one round: the bound of what is kept of them for backward.

    Args:
        tokens: of a rank.
        top_k: experts a token.
        ranks: that divide the experts.
        experts: of a rank.
        round_size: multiple of an even share, `tokens * top_k`.
    """
    even = math.ceil(tokens * top_k * round_size)
    return min(-(-even // _TILE) * _TILE, worst_case(tokens, top_k, ranks, experts))


def worst_case(tokens: int, top_k: int, ranks: int, experts: int) -> int:
    """Returns the rows that experts of a rank multiply where every token chooses as many of them as it can."""
    return ranks * tokens * min(top_k, experts)


def check_chunks(chunks: object) -> None:
    """Refuses what is no number of chunks.

    Raises:
        ValueError: naming it.
    """
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise ValueError(f"`exchange_chunks` is {chunks!r}; it must be a whole number of at least 1, such as 2.")
