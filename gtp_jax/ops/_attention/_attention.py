"""Dot-product attention: cuDNN's kernels where they compute the same, otherwise written out in jax.numpy, or in blocks
if there are too many scores."""

from __future__ import annotations

import jax

from .._implementation import Implementation, choose
from ._blocks import IN_BLOCKS
from ._checks import check_operands, check_places
from ._contract import Problem
from ._cudnn import CUDNN
from ._packed import PACKED
from ._written_out import WRITTEN_OUT

# The first that lacks nothing is taken.
TABLE = (PACKED, CUDNN, IN_BLOCKS, WRITTEN_OUT)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    window: int | None = None,
    mask: jax.Array | None = None,
    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    query_position: jax.Array | int | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes `softmax(soft_cap(q k^T * scale), where allowed) v`, for each head.

    The softmax is computed in at least float32. The output of a query that may not attend to any key is zero, and has
    no gradient. cuDNN never stores the scores. When attention is written out, those of a head are an array of
    `(queries, keys)`. If that is more than `MOST_SCORES`, attention is computed in blocks, and memory is linear in the
    number of tokens. It then has no forward mode (`jax.jvp`), but its gradients do.

    Args:
        q: `(batch, queries, heads, head_dim)`.
        k: `(batch, keys, num_kv_heads, head_dim)`; `num_kv_heads` divides `heads`.
        v: the same shape as `k`.
        causal: whether a query may not attend to later keys.
        window: the size of the attention window: a query attends to keys less than this many positions away, including
            the key at its own position. With `causal`, these are the last `window` keys, as in Mistral
            (arXiv 2310.06825).
        mask: boolean, true where a query may attend: `(queries, keys)`, `(batch, queries, keys)`, or
            `(batch, heads, queries, keys)`, where batch, heads and queries may be 1. Queries x keys must be at most
            2**30 elements.
        segment_ids: `(batch, sequence)` integers. Tokens attend only to tokens with the same id. If queries and keys
            are of different sequences, a pair of such arrays. Attention is fastest if the ids form runs, as those of
            consecutive documents do.
        scale: the factor of the scores; `head_dim ** -0.5` by default.
        soft_cap: if given, scores become `soft_cap * tanh(score / soft_cap)` (Gemma 2, arXiv 2408.00118).
        sinks: `(heads,)`, for each head a logit that takes part in the softmax but has no value (gpt-oss).
        dropout_rate: the fraction of attention weights set to 0. The others are multiplied by
            `1 / (1 - dropout_rate)`.
        dropout_key: a key of `jax.random`, required for dropout. In blocks, other weights are dropped: the bits of each
            block are those of the key, folded with the number of the block.
        query_position: the position of the first query among the keys, for queries that continue a sequence whose
            earlier keys are cached: an integer, or integers `(batch,)`. The other queries follow it, and `causal` and
            `window` count from these positions. By default, the queries are the whole sequence. With as many keys as
            queries, 0 gives the same bits as the default.
        implementation: `"reference"` for the written-out form, or blocks, `"native"` for cuDNN, or `None` for the best
            available. `cudnn_lacks` returns what cuDNN does not support. Masks in cuDNN also need sequences of even
            length.

    Returns:
        `(batch, queries, heads, head_dim)`, in the dtype of `q`.

    Raises:
        ValueError: if an argument is out of range, or not consistent with the others.
        TypeError: if `query_position` is not an integer.
        NotImplementedError: if `implementation` is `"native"`, and cuDNN does not support these arguments.
    """
    check_operands(q, k, v, causal, window, mask, segment_ids, soft_cap, sinks, dropout_rate, dropout_key)
    first = check_places(q, k, causal, window, query_position)
    if isinstance(scale, jax.Array):  # kernels need a scale that is known at compile time
        q, scale = (q * scale).astype(q.dtype), 1.0
    factor: float = q.shape[-1] ** -0.5 if scale is None else scale
    masks = causal, window, first, mask, segment_ids
    problem = Problem(q, k, v, *masks, factor, soft_cap, sinks, dropout_rate, dropout_key)
    return choose("attention", implementation, TABLE, problem).run(problem)
