"""Attention to a part of the keys, and its gradients, of which attention to divided keys is composed."""

from __future__ import annotations

import functools
from typing import Any

import jax

from .._implementation import Implementation, runs_native
from . import _cudnn_calls as cudnn
from ._blocks import Rule, backward_in_blocks, forward_in_blocks
from ._checks import check_shapes
from ._cudnn import cudnn_lacks
from ._cudnn_calls import Options
from ._packed import joining_batches, sharded_by_xla


def attention_with_lse(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes `softmax(q k^T * scale) v` for each head, and the log-sum-exp of the scores.

    To combine the outputs for parts of the keys, weight each by `exp(lse - lse_of_all)`. cuDNN's calls cannot be
    differentiated: for gradients, call `attention_backward` in a `jax.custom_vjp` of your own.

    Args:
        q: `(batch, queries, heads, head_dim)`.
        k: `(batch, keys, kv_heads, head_dim)`; `kv_heads` divides `heads`.
        v: the same shape as `k`.
        causal: whether a query may not attend to later keys; requires equal numbers of queries and keys.
        scale: the factor of the scores; `head_dim ** -0.5` by default.
        implementation: `"reference"` for blocks of scores, `"native"` for cuDNN, or `None` for the best available.

    Returns:
        The output, `(batch, queries, heads, head_dim)` in the dtype of `q`, and the log-sum-exp, `(batch, heads,
        queries)` in at least float32.

    Raises:
        ValueError: if the shapes are not consistent with each other.
        NotImplementedError: if `implementation` is `"native"` and cuDNN does not support these arguments.
    """
    options, native = _checked("attention_with_lse", q, k, v, causal, scale, implementation)
    if native:
        call = functools.partial(cudnn.forward, bias=None, documents=None, options=options)
        return joining_batches(lambda q, k, v: call(q, k, v))(q, k, v)
    return forward_in_blocks(q, k, v, Rule(causal), scale=options.scale)


def attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    of_out: jax.Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the gradients of `q`, `k` and `v`, or what a part of the keys contributes to them.

    Args:
        q, k, v, causal, scale, implementation: as in `attention_with_lse`.
        out: the output of attention to all keys, of which `k` may be a part; the shape and dtype of `q`.
        lse: its log-sum-exp, `(batch, heads, queries)`.
        of_out: the gradient of `out`, in its shape and dtype.

    Returns:
        The gradients of `q`, `k` and `v`: in the dtype of `q` from cuDNN, otherwise in at least float32.

    Raises:
        ValueError: if the shapes are not consistent with each other.
        NotImplementedError: if `implementation` is `"native"` and cuDNN does not support these arguments.
    """
    options, native = _checked("attention_backward", q, k, v, causal, scale, implementation)
    batch, queries, heads, _ = q.shape
    if out.shape != q.shape or of_out.shape != q.shape or lse.shape != (batch, heads, queries):
        raise ValueError(
            f"`out` {out.shape}, `of_out` {of_out.shape}, `lse` {lse.shape}: `out` and `of_out` must have the shape of "
            f"`q` {q.shape}, and `lse` must be {(batch, heads, queries)}."
        )
    if native:
        call = functools.partial(cudnn.backward, bias=None, documents=None, options=options)
        named = joining_batches(lambda q, k, v, out, lse, of_out: call(q, k, v, stats=lse, out=out, of_out=of_out))
        return named(q, k, v, out.astype(q.dtype), lse, of_out.astype(q.dtype))
    return backward_in_blocks(q, k, v, Rule(causal), out, lse, of_out, scale=options.scale)


def _checked(
    name: str, q: Any, k: Any, v: Any, causal: bool, scale: float | None, implementation: Implementation | None
) -> tuple[Options, bool]:
    """Returns the options of the kernel, and whether cuDNN runs it."""
    check_shapes(q, k, v, causal=causal)
    lacks = cudnn_lacks(q.dtype, q.shape[-1]) or sharded_by_xla(q)
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return Options(causal, None, factor), runs_native(name, implementation, lacks)
