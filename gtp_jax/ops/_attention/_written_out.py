"""Attention written out in jax.numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .._one_row import is_one_row, one_row_einsum
from ._contract import DotProductAttention, Problem
from ._masks import both, by_group, in_order

# Up to this number of keys, attention of a single query is faster on GPUs as sums of products than as matmuls.
_FEW_KEYS = 512


def _run(problem: Problem) -> jax.Array:
    q, k, v, sinks = problem.q, problem.k, problem.v, problem.sinks
    allowed, causal, window = problem.masks()
    ordered = in_order(*problem.sizes, causal, window)
    # jax.nn's own XLA path computes the softmax in float32 for any input dtype; here float64 stays float64.
    batch, queries, heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    groups = jnp.reshape(q, (batch, queries, num_kv_heads, heads // num_kv_heads, head_dim))
    wide = jnp.promote_types(q.dtype, jnp.float32)
    one_row = is_one_row(batch, queries) and k.shape[1] <= _FEW_KEYS
    if one_row:
        scores = one_row_einsum("bqkgd,bskd->bkgqs", groups, k) * problem.scale
    else:
        scores = jnp.einsum("bqkgd,bskd->bkgqs", groups, k, preferred_element_type=wide) * problem.scale
    if problem.soft_cap is not None:
        scores = problem.soft_cap * jnp.tanh(scores / problem.soft_cap)
    where = both(None if allowed is None else by_group(allowed, num_kv_heads), ordered)
    if where is not None:
        scores = jnp.where(where, scores, jnp.finfo(wide).min)
    if sinks is not None:
        logits = jnp.reshape(sinks.astype(wide), (num_kv_heads, -1, 1, 1))
        scores = jnp.concatenate([scores, jnp.broadcast_to(logits, (*scores.shape[:-1], 1))], axis=-1)
    probs = jax.nn.softmax(scores, axis=-1)
    if sinks is not None:
        probs = probs[..., :-1]
    if where is not None and problem.unseeing:
        # the softmax of a row without keys is uniform; give it no value and no gradient
        probs = jnp.where(where, probs, 0)
    if rate := problem.dropout_rate:
        assert problem.dropout_key is not None
        kept = jax.random.bernoulli(problem.dropout_key, 1 - rate, probs.shape)
        probs = jnp.where(kept, probs / (1 - rate), 0)
    einsum = one_row_einsum if one_row else jnp.einsum
    return jnp.reshape(einsum("bkgqs,bskd->bqkgd", probs.astype(v.dtype), v), q.shape).astype(q.dtype)


WRITTEN_OUT = DotProductAttention(native=False, lacks=lambda problem: "", run=_run)
