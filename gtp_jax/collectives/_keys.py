"""Attention over sequences that ranks divide, by gathering keys and values. Called inside a `shard_map`.

Each rank keeps its part of every sequence, and gathers the keys and values of all parts, so any number of heads is
right. Causal attention is divided evenly among ranks: see `_halves`. A rank's queries attend to its own keys while keys
and values are gathered, and while queries travel to the ranks that work on them. The results for the other keys travel
back, and are merged with those for its own keys by the log-sum-exp of their scores.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float

from ..mesh import degree
from ..ops import attention, attention_backward, attention_with_lse, check_mask, save_attention
from ._halves import from_workers, to_workers, work
from ._over_gloo import all_gather, reduce_scatter
from ._turns import Turn, at_once, in_turn, tied, turn_after, turn_in_scope


def attention_to_gathered_keys(
    q: Float[jax.Array, "batch part heads head_dim"],
    k: Float[jax.Array, "batch keys kv_heads head_dim"],
    v: Float[jax.Array, "batch keys kv_heads head_dim"],
    axis: str,
    *,
    causal: bool = False,
    window: int | None = None,
    mask: jax.Array | None = None,
    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    scale: float | jax.Array | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> Float[jax.Array, "batch part heads head_dim"]:
    """Returns this rank's part of `ops.attention` of whole sequences.

    Causal attention without other options is divided evenly among ranks, if a part has an even number of tokens. With
    any other option, every rank computes its own queries, and the last rank of causal attention has the most to do.

    Args:
        q, k, v: this rank's part of queries, keys and values.
        axis: the mesh axis that divides sequences.
        mask, segment_ids: of whole sequences, the same on all ranks of the axis.

    The other arguments are those of `ops.attention`.

    Raises:
        ValueError: for the reasons of `ops.attention`.
    """
    (batch, part, heads, head_dim), keys, ranks = q.shape, k.shape[1], degree(axis)
    if causal and part != keys:
        raise ValueError(
            f"`causal` compares positions in one sequence, but there are {part * ranks} queries and {keys * ranks} "
            "keys."
        )
    options: dict[str, Any] = {"soft_cap": soft_cap, "sinks": sinks, "dropout_key": dropout_key}
    plain = all(option is None for option in (window, mask, segment_ids, *options.values()))
    if causal and plain and not dropout_rate and part % 2 == 0:
        if isinstance(scale, jax.Array):  # kernels need a scale that is known at compile time
            q, scale = (q * scale).astype(q.dtype), 1.0
        return _balanced(q, k, v, turn_in_scope(), axis, head_dim**-0.5 if scale is None else float(scale))
    first = lax.axis_index(axis) * part
    if mask is not None:
        check_mask(mask, batch, part * ranks, keys * ranks, heads)
        mask = lax.dynamic_slice_in_dim(mask, first, part, mask.ndim - 2)
    if segment_ids is not None:
        of_queries, of_keys = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        if of_queries.shape != (batch, part * ranks):
            raise ValueError(
                f"`segment_ids` of queries has the shape {of_queries.shape}; it must be {(batch, part * ranks)}."
            )
        segment_ids = lax.dynamic_slice_in_dim(of_queries, first, part, 1), of_keys
    k, v = in_turn((k, v), turn_in_scope())
    options |= {"causal": causal, "window": window, "mask": mask, "segment_ids": segment_ids, "scale": scale}
    position = first if causal or window is not None else None
    whole = (_gathered(x, axis) for x in (k, v))
    return attention(q, *whole, query_position=position, dropout_rate=dropout_rate, **options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(x: jax.Array, axis: str) -> jax.Array:
    """Returns the whole sequence. Its gradient is summed over ranks in at least float32."""
    return all_gather(x, axis, dim=1)


_gathered.defvjp(
    lambda x, axis: (all_gather(x, axis, dim=1), None),
    lambda axis, _, gradient: (reduce_scatter(_wide(gradient), axis, dim=1).astype(gradient.dtype),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _balanced(q: jax.Array, k: jax.Array, v: jax.Array, turn: Turn, axis: str, scale: float) -> jax.Array:
    return _forward(q, k, v, turn, axis, scale)[0]


def _balanced_forward(q: jax.Array, k: jax.Array, v: jax.Array, turn: Turn, axis: str, scale: float) -> Any:
    # remat policies save the results of `jax.nn.dot_product_attention`, so they must save these too
    out, lse = map(save_attention, _forward(q, k, v, turn, axis, scale))
    return out, (q, k, v, out, lse)


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, turn: Turn, axis: str, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Returns this rank's part of the result, and the log-sum-exp of its scores, `(batch, heads, part)`."""
    arriving = to_workers(tied(q, turn), axis, 1), [_parts(x, axis) for x in tied((k, v), turn)]
    own, (halves, kv) = at_once(attention_with_lse(q, k, v, causal=True, scale=scale), arriving)

    def attend(n: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        half, part = work(axis, n)
        found = attention_with_lse(halves[half], *(x[part] for x in kv), causal=False, scale=scale)
        out, lse = (
            _put(x, half, one) for x, one in zip(sums, _merged((sums[0][half], sums[1][half]), found), strict=True)
        )
        return out, lse

    statistics = jnp.full((2, *own[1].shape[:-1], q.shape[1] // 2), -jnp.inf, own[1].dtype)
    out, lse = lax.fori_loop(0, degree(axis) - 1, attend, (jnp.zeros_like(_wide(halves)), statistics))
    # other ranks' results are rounded once, as those of the kernels are
    others = from_workers(out.astype(q.dtype), axis, 1), from_workers(lse, axis, 2)
    out, lse = _merged(own, others)
    return out.astype(q.dtype), lse


def _balanced_backward(axis: str, scale: float, saved: Any, of_out: jax.Array) -> Any:
    q, k, v, out, lse = saved
    # otherwise XLA would gather keys and values once, and keep them from forward to backward
    k, v = tied((k, v), turn_after(of_out))
    arriving = (
        to_workers(jnp.stack([q, out, of_out]), axis, 2),
        to_workers(lse, axis, 2),
        [_parts(x, axis) for x in (k, v)],
    )
    own = attention_backward(q, k, v, out, lse, of_out, causal=True, scale=scale)
    own, (halves, statistics, kv) = at_once(own, arriving)

    def add(n: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        half, part = work(axis, n)
        q, out, of_out = halves[half]
        k, v = (x[part] for x in kv)
        terms = attention_backward(q, k, v, out, statistics[half], of_out, causal=False, scale=scale)
        return tuple(_put(x, at, x[at] + one) for x, at, one in zip(sums, (half, part, part), terms, strict=True))

    zeros = tuple(jnp.zeros_like(_wide(x)) for x in (halves[:, 0], *kv))
    of_halves, *of_kv = lax.fori_loop(0, degree(axis) - 1, add, zeros)
    others = from_workers(of_halves.astype(q.dtype), axis, 1), *(reduce_scatter(x, axis, dim=0)[0] for x in of_kv)
    sums = tuple((_wide(a) + b).astype(x.dtype) for a, b, x in zip(own, others, (q, k, v), strict=True))
    return *sums, turn_after(sums)


_balanced.defvjp(_balanced_forward, _balanced_backward)


def _parts(x: jax.Array, axis: str) -> jax.Array:
    """Returns the parts of all ranks, `(ranks, ...)`."""
    return all_gather(x[None], axis, dim=0)


def _put(x: jax.Array, at: jax.Array, value: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x, value, at, 0)


def _merged(one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns the result for all keys, given those for two sets of keys: pairs of an output `(batch, queries, heads,
    head_dim)` and the log-sum-exp of its scores, `(batch, heads, queries)`. One of the two sets may be empty."""
    lse = jnp.logaddexp(one[1], other[1])
    mine, others = (jnp.swapaxes(jnp.exp(own - lse), 1, 2)[..., None] * _wide(out) for out, own in (one, other))
    return mine + others, lse


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
