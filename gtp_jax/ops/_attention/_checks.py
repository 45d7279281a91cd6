"""Checks the arguments of attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

_LARGEST_MASK = 2**30  # the most queries x keys of a mask


def check_operands(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    causal: bool,
    window: int | None,
    mask: jax.Array | None,
    segment_ids: Any,
    soft_cap: float | None,
    sinks: jax.Array | None,
    dropout_rate: float,
    dropout_key: jax.Array | None,
) -> None:
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(f"`q` {q.shape} and `k` {k.shape} must be (batch, sequence, heads, head_dim).")
    check_shapes(q, k, v)
    (batch, queries, heads, _), keys = q.shape, k.shape[1]
    check_choices(window=window, soft_cap=soft_cap, dropout_rate=dropout_rate)
    if mask is not None:
        check_mask(mask, batch, queries, keys, heads)
    if segment_ids is not None:
        pair = isinstance(segment_ids, tuple)
        shapes = tuple(ids.shape for ids in segment_ids) if pair else (segment_ids.shape,) * 2
        if shapes != ((batch, queries), (batch, keys)):
            raise ValueError(
                f"`segment_ids` has the shape {shapes if pair else shapes[0]}; it must be {(batch, queries)} for "
                f"queries and {(batch, keys)} for keys, as a pair if these differ."
            )
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"`sinks` has the shape {sinks.shape}; it must be ({heads},), one logit per query head.")
    if dropout_rate and dropout_key is None:
        raise ValueError(f"`dropout_rate` is {dropout_rate}, which needs a `dropout_key`.")


def check_places(q: jax.Array, k: jax.Array, causal: bool, window: int | None, position: Any) -> Any:
    """Checks the positions of queries among the keys, and returns that of the first query; `None` if masks need not
    depend on it."""
    queries, keys = q.shape[1], k.shape[1]
    if position is not None:
        _check_query_position(position, q.shape[0], queries, keys)
        whole = isinstance(position, int) and position == 0 and queries == keys
        return position if (causal or window is not None) and not whole else None
    if causal and queries != keys:
        raise ValueError(
            f"`causal` compares positions in one sequence, but there are {queries} queries and {keys} keys. Pass the "
            "position of the first query among the keys as `query_position`."
        )
    return None


def _check_query_position(position: Any, batch: int, queries: int, keys: int) -> None:
    """Checks that the position of the first query is a position among the keys, with room for the other queries.

    A traced value cannot be checked. With `causal` and no window, a query after the last key then attends to all keys,
    and one before the first key attends to none.

    Raises:
        TypeError: if the position is not an integer.
        ValueError: if its shape or value is not allowed; the message names it, and what is allowed.
    """
    if isinstance(position, bool) or not jnp.issubdtype(jnp.result_type(position), jnp.integer):
        raise TypeError(f"`query_position` is {position!r}; it must be an integer, or integers of shape ({batch},).")
    if jnp.shape(position) not in ((), (batch,)):
        raise ValueError(
            f"`query_position` has the shape {jnp.shape(position)}; it must be a scalar, or ({batch},), one position "
            "per example."
        )
    if isinstance(position, Tracer):
        return
    places = np.asarray(position)  # concrete, even while a program is traced
    lowest, highest = int(places.min()), int(places.max())
    if lowest < 0 or highest + queries > keys:
        got = f"{lowest}" if lowest == highest else f"{lowest} to {highest}"
        raise ValueError(
            f"`query_position` is {got}; for {queries} queries among {keys} keys, it must be from 0 to "
            f"{keys - queries}."
        )


def check_shapes(q: Any, k: Any, v: Any, *, causal: bool = False) -> None:
    """Checks that the shapes of queries, keys and values fit each other and, if `causal`, that queries and keys are of
    one sequence.

    Raises:
        ValueError: if they do not; the message names the shapes, and what is allowed.
    """
    if v.shape != k.shape or q.shape[::3] != k.shape[::3] or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"`q` {q.shape}, `k` {k.shape}, `v` {v.shape}: `k` and `v` must have the same shape, with the batch and "
            "head_dim of `q`, and a number of heads that divides that of `q`."
        )
    if causal and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"`causal` compares positions in one sequence, but there are {q.shape[1]} queries and {k.shape[1]} keys."
        )


def check_mask(mask: Any, batch: int, queries: int, keys: int, heads: int) -> None:
    """Checks that a mask is boolean, and that its shape fits.

    Raises:
        ValueError: if it does not; the message names its shape or dtype, and what is allowed.
    """
    if mask.dtype != jnp.bool_:
        raise ValueError(
            f"`mask` is of {mask.dtype}; it must be boolean, true where a query may attend. Write `mask > 0`, or "
            "`bias == 0` for an additive mask."
        )
    leading = {2: ((),), 3: ((batch,), (1,)), 4: tuple((b, h) for b in (batch, 1) for h in (heads, 1))}
    ends = (queries, keys), (1, keys)
    if mask.ndim not in leading or mask.shape[:-2] not in leading[mask.ndim] or mask.shape[-2:] not in ends:
        raise ValueError(
            f"`mask` has the shape {mask.shape}; it must be {(queries, keys)}, {(batch, queries, keys)} or "
            f"{(batch, heads, queries, keys)}, where batch, heads and queries may be 1."
        )
    if mask.shape[-2] * keys > _LARGEST_MASK:
        raise ValueError(
            f"`mask` has the shape {mask.shape}, with {mask.shape[-2]} queries x {keys} keys; it must have at most "
            f"{_LARGEST_MASK} of such elements. Pass `causal` (`is_causal` of `attention_fn`), a window or segments "
            "instead, which need no such array, or a mask of keys alone, whose queries are 1."
        )


def check_choices(*, window: int | None, soft_cap: float | None, dropout_rate: float) -> None:
    """Checks that numbers are in range.

    Raises:
        ValueError: if one is not; the message names the argument, its value and what is allowed.
    """
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"`window` is {window!r}; it must be a number of keys, at least 1, or None for no window.")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"`soft_cap` is {soft_cap}; it must be a number above 0, or None for no soft cap.")
    if not 0 <= dropout_rate < 1:
        raise ValueError(f"`dropout_rate` is {dropout_rate}; it must be at least 0 and below 1.")
