"""Attention over sequences that ranks divide, by gathering keys and values. Called inside a `shard_map`.

Each rank keeps its part of every sequence, and gathers the keys and values of all parts, so the number of heads does
not matter. `_balanced` divides causal attention evenly.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax
from jaxtyping import Float

from ..mesh import degree
from ..ops import attention, check_mask
from ._balanced import balanced_attention, wide
from ._over_gloo import all_gather, reduce_scatter
from ._turns import in_turn, turn_in_scope


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
    """Returns this rank's part of `ops.attention` over whole sequences.

    Causal attention without other options is divided evenly among ranks, if a part has an even number of tokens.
    Otherwise, every rank computes its own queries. If attention is causal, the last rank then has the most to do.

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
        return balanced_attention(q, k, v, turn_in_scope(), axis, head_dim**-0.5 if scale is None else float(scale))
    first = lax.axis_index(axis) * part
    if mask is not None:
        check_mask(mask, batch, part * ranks, keys * ranks, heads)
        if mask.shape[-2] != 1:  # otherwise it is a mask of keys
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


def _gathered_backward(axis: str, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (reduce_scatter(wide(gradient), axis, dim=1).astype(gradient.dtype),)


_gathered.defvjp(lambda x, axis: (_gathered(x, axis), None), _gathered_backward)
