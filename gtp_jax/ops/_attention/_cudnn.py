"""Attention of whole sequences in cuDNN, through `jax.nn`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...mesh import largest_attention_head, platform
from ._blocks import MOST_MASKED
from ._contract import DotProductAttention, Problem
from ._masks import both, in_order


def cudnn_lacks(
    dtype: jax.typing.DTypeLike, head_dim: int, *, soft_cap: bool = False, sinks: bool = False, dropout: bool = False
) -> str:
    """Returns why cuDNN, called through `jax.nn.dot_product_attention` of jax 0.11.2 and 0.12.0, does not support such
    attention on the current devices; an empty string if it does.

    Its kernels compute causal and windowed attention without a mask, and segments where `packed_lacks` returns an empty
    string. For a boolean mask, a window without `causal`, and other segments, they read an array of `(queries, keys)`.
    If that is more than `MOST_MASKED`, and not a mask that the caller made, `attention` is computed in blocks instead.
    """
    extras = {"soft cap": soft_cap, "sinks": sinks, "dropout": dropout}
    asked = [name for name, wanted in extras.items() if wanted]
    if asked:
        return f"jax.nn has no {' and no '.join(asked)} in cuDNN's attention"
    if platform() != "gpu":
        return "cuDNN runs on GPUs only"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN supports bfloat16 and float16 on GPUs, and this is {jnp.dtype(dtype)}"
    largest = largest_attention_head()
    if head_dim % 8 or head_dim > largest:
        return f"cuDNN supports heads of a multiple of 8 up to {largest} on these GPUs, and this is {head_dim}"
    return ""


def lacks_kernels(problem: Problem) -> str:
    """Returns why cuDNN has no kernel for a problem, packed or not; an empty string if it has."""
    (queries, keys), head_dim = problem.sizes, problem.q.shape[-1]
    extras = dict(soft_cap=problem.soft_cap is not None, sinks=problem.sinks is not None)
    if lacks := cudnn_lacks(problem.q.dtype, head_dim, **extras, dropout=problem.dropout_rate > 0):
        return lacks
    masked = problem.first is not None or problem.mask is not None or problem.segment_ids is not None
    if masked and (queries % 2 or keys % 2):
        return f"cuDNN supports masks over sequences of even length only; these are {queries} and {keys}"
    return ""


def _lacks(problem: Problem) -> str:
    """Returns why cuDNN does not compute a problem, or would need an array of `(queries, keys)` that is too large and
    not the caller's mask; an empty string if it computes it."""
    if (lacks := lacks_kernels(problem)) or problem.scores <= MOST_MASKED:
        return lacks
    (queries, keys), mask = problem.sizes, problem.mask
    asked = {
        "the positions of queries among the keys": problem.first is not None,
        "these segments": problem.segment_ids is not None,
        "a mask of keys": mask is not None and mask.shape[-2] != queries,
        "a window": problem.window is not None and (not problem.causal or mask is not None),
    }
    if needs := [name for name, given in asked.items() if given]:
        return f"cuDNN reads {' and '.join(needs)} as an array of {queries} queries x {keys} keys"
    return ""


def _run(problem: Problem) -> jax.Array:
    q, k, v = problem.q, problem.k, problem.v
    allowed, causal, window = problem.masks()
    options: dict[str, Any] = {"is_causal": causal, "scale": problem.scale, "implementation": "cudnn"}
    if window is not None and causal and allowed is None:
        return jax.nn.dot_product_attention(q, k, v, local_window_size=(window - 1, 0), **options)
    ordered = in_order(*problem.sizes, causal, window)
    if window is not None:  # cuDNN has no kernel for a window to both sides, or for a window with a mask
        allowed = both(allowed, None if ordered is None else ordered[None, None])
    if allowed is None:
        return jax.nn.dot_product_attention(q, k, v, **options)
    allowed = jnp.broadcast_to(allowed, (*allowed.shape[:2], *problem.sizes))
    if not problem.unseeing:
        return jax.nn.dot_product_attention(q, k, v, mask=allowed, **options)
    where = allowed if ordered is None else allowed & ordered
    some = jnp.any(where, axis=-1, keepdims=True)
    # The kernel adds a large negative number to masked scores, which may overflow if all scores of a row are masked. So
    # such a row attends to all keys, and its output is replaced by zeros.
    mixed = jax.nn.dot_product_attention(q, k, v, mask=allowed | ~some, **options)
    return jnp.where(jnp.swapaxes(some, 1, 2), mixed, 0)


CUDNN = DotProductAttention(native=True, lacks=_lacks, run=_run)
