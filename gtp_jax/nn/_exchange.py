"""The experts of a mixture on the ranks that have them, with tokens exchanged."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..collectives import Transport, choose_transport, combine, dispatch, gather_shares, plan_journey
from ..mesh import degree
from ..ops import (
    SlottedWeight,
    expand,
    in_rounds,
    save_activation,
    save_for_backward,
    save_routing,
    weighted_sum,
    window_of,
)
from ._grouped import GroupedDense
from ._weight import apply_gathered

# Places of a round are a multiple of this.
_TILE = 16

# What brings tokens to their experts: ahead of the collectives, those, and behind them.
_MOVES = ("gather", "all_gather", "all_to_all", "ragged_all_to_all", "reshape", "bitcast_convert_type")


def exchange(
    x: jax.Array,
    chosen: jax.Array,
    shares: jax.Array,
    up: GroupedDense,
    down: GroupedDense,
    activation: Callable[[jax.Array], jax.Array],
    *,
    axis: str,
    transport: Transport | None = None,
    round_size: float = 1.25,
) -> jax.Array:
    """Returns the sum of each token's experts, each times its share, of experts that are divided among ranks. Called in
    local view.

    A token is sent once to each rank that has experts of its choice, together with its choices and shares; there the
    rows are sorted by expert, multiplied, weighted and added up; partial sums travel back. No token is dropped.

    Args:
        x: `(tokens, features)`, of the compute dtype.
        chosen: int32 `(tokens, top_k)`.
        shares: float32 at least, likewise.
        up: of `gate` and `up`.
        down: partial sums of tensor ranks are left to the caller.
        activation: elementwise, on the gate.
        axis: of the ranks.
        transport: how tokens travel; `None` for what the table says.
        round_size: places of a round, as a multiple of those that experts of equal load fill. Where a rank's experts
            have more, it multiplies in several rounds.
    """
    ranks, (tokens, top_k) = degree(axis), chosen.shape
    own = up.own_experts
    transport = choose_transport(ranks, transport)
    journey, every = plan_journey(chosen, axis, own, transport)
    size = places_of_round(tokens, top_k, ranks, own, round_size)

    # experts of other ranks, and rows that no token has, count as the one behind the last
    number = journey.of_rows(every) - lax.axis_index(axis) * own
    number = jnp.where((number >= 0) & (number < own) & journey.real[:, None], number, own)
    order = save_routing(jnp.argsort(jnp.ravel(number), stable=True).astype(jnp.int32))
    inverse = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32))
    places = jnp.reshape(inverse, number.shape)
    sizes = jnp.bincount(jnp.ravel(number), length=own).astype(jnp.int32)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)

    def one_round(index: Any, operands: Any, constants: Any) -> jax.Array:
        rows, shares, *floats = operands
        order, places, ends, keys, values = constants
        weights = [f if v is None else SlottedWeight(v, f) for f, v in zip(floats, values, strict=True)]
        window = window_of(order, places, ends[-1], index * size, size)
        sizes = jnp.diff(jnp.clip(ends - index * size, 0, size), prepend=0)
        hidden = up.product_of(weights[0], expand(rows, window), sizes, keys[0])
        act = save_activation(activation(hidden["gate"]) * hidden["up"])
        return weighted_sum(down.product_of(weights[1], act, sizes, keys[1]), shares, window)

    def experts(up_weight: Any, down_weight: Any, rows: jax.Array, shares: jax.Array) -> jax.Array:
        weights = up_weight, down_weight
        floats = [w.slot if isinstance(w, SlottedWeight) else w for w in weights]
        values = [w.values if isinstance(w, SlottedWeight) else None for w in weights]
        operands, constants = (rows, shares, *floats), (order, places, ends, keys, values)
        if size == worst_case(tokens, top_k, ranks, own):
            return one_round(0, operands, constants)
        return in_rounds(one_round, operands, constants, jnp.maximum(1, -(-ends[-1] // size)))

    keys = up.call_key(), down.call_key()
    of_rows = journey.of_rows(gather_shares(shares, axis))

    def there(x: jax.Array, of_rows: jax.Array) -> jax.Array:
        return apply_gathered((up, down), experts, dispatch(x, journey), of_rows)

    # whatever else a layer keeps for backward, what has arrived is sent again
    partial_sums = jax.checkpoint(there, policy=_keeps, prevent_cse=False)(x, of_rows)
    return save_for_backward(combine(partial_sums, journey))


def _keeps(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name not in _MOVES


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
