"""Attention whose forward multiplies in FP8."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

from ...formats import FP8_E4M3, QuantizedArray
from ...mesh import supports_packed_attention
from .._implementation import Implementation, runs_native
from .._linear import fp8_values
from .._operand import quantizable, tensor_unit
from .._quantize import multi_amax, power_of_two_amax, quantize, quantize_fused
from .._save import save_attention, save_for_backward
from .._slot import refuse_second_derivative
from . import _cudnn_calls as cudnn
from ._checks import check_shapes
from ._cudnn import cudnn_lacks
from ._cudnn_calls import Options
from ._masks import in_order
from ._packed import joining_batches, sharded_by_xla

# The factor of the weights of the softmax before they are rounded. They are at most 1, and E4M3 ends at 448.
SCALE_OF_WEIGHTS = 256.0
# The head_dim, and the divisor of sequence lengths, that cuDNN supports if it returns what backward needs.
_HEAD_DIM, _TILE = 128, 128


def attention_fp8(
    q: Float[jax.Array, "batch queries heads head_dim"],
    k: Float[jax.Array, "batch keys kv_heads head_dim"],
    v: Float[jax.Array, "batch keys kv_heads head_dim"],
    *,
    causal: bool = False,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> Float[jax.Array, "batch queries heads head_dim"]:
    """Computes `softmax(q k^T * scale) v` for each head, with both matmuls of forward in E4M3.

    Queries, keys and values are each scaled by their own amax, the weights of the softmax by a constant, and the output
    by the amax of the values; all scales are powers of two. The softmax and its sum are computed in float32. Backward
    does not multiply in FP8, and takes the gradient at the rounded queries, keys and values.

    Args:
        q: `(batch, queries, heads, head_dim)`.
        k: `(batch, keys, kv_heads, head_dim)`; `kv_heads` divides `heads`.
        v: the same shape as `k`.
        causal: whether a query may not attend to later keys; there must then be as many keys as queries.
        scale: the factor of the scores; `head_dim ** -0.5` by default.
        implementation: `"reference"` to write the scores to memory, `"native"` for cuDNN, or `None` for the best
            available. `attention_fp8_lacks` returns what cuDNN does not support.

    Returns:
        `(batch, queries, heads, head_dim)`, in the dtype of `q`.

    Raises:
        ValueError: if the shapes are not consistent with each other.
        NotImplementedError: if `implementation` is `"native"`, and cuDNN does not support these arguments.
    """
    check_shapes(q, k, v, causal=causal)
    native = runs_native("attention_fp8", implementation, attention_fp8_lacks(q, k))
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return _attention(q, k, v, Options(causal, None, factor), native)


def attention_fp8_lacks(q: Any, k: Any) -> str:
    """Returns why cuDNN does not support FP8 attention of these queries and keys here; an empty string if it does."""
    (queries, head_dim), keys = q.shape[1::2], k.shape[1]
    if lacks := cudnn_lacks(q.dtype, head_dim):
        return lacks
    if not supports_packed_attention():
        return "cuDNN's attention in FP8 requires compute capability 9.0 (H100)"
    if head_dim != _HEAD_DIM or queries % _TILE or keys % _TILE:
        return (
            f"cuDNN's attention in FP8 supports heads of {_HEAD_DIM} and sequences of a multiple of {_TILE}, and these "
            f"are heads of {head_dim}, {queries} queries and {keys} keys"
        )
    return "" if isinstance(q, jax.ShapeDtypeStruct) else sharded_by_xla(q)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _attention(q: jax.Array, k: jax.Array, v: jax.Array, options: Options, native: bool) -> jax.Array:
    return _attention_forward(q, k, v, options, native)[0]


def _attention_forward(q: jax.Array, k: jax.Array, v: jax.Array, options: Options, native: bool) -> Any:
    q, k, v = refuse_second_derivative("attention_fp8", (q, k, v))
    dtype = q.dtype
    queries, keys, values = _quantized(q), _quantized(k), _quantized(v)
    out, stats = (_by_cudnn if native else _written_out)(queries, keys, values, options)
    out = save_attention(out.astype(dtype) * tensor_unit(values).astype(dtype))
    return out, ((queries, keys, values), save_attention(stats), out)


def _attention_backward(options: Options, native: bool, saved: Any, of_out: jax.Array) -> Any:
    codes, stats, out, of_out = refuse_second_derivative("attention_fp8", (*saved, of_out))
    q, k, v = (fp8_values(x).astype(out.dtype) * tensor_unit(x).astype(out.dtype) for x in codes)
    if native:
        backward = functools.partial(cudnn.backward, bias=None, documents=None, options=options)
        named = joining_batches(
            lambda q, k, v, stats, out, of_out: backward(q, k, v, stats=stats, out=out, of_out=of_out)
        )
        return named(q, k, v, stats, out, of_out)
    return _written_backward(q, k, v, stats, out, of_out, options)


_attention.defvjp(_attention_forward, _attention_backward)


def _quantized(x: jax.Array) -> QuantizedArray:
    values = quantizable(x)
    amax = save_for_backward(power_of_two_amax(multi_amax([values])[0], FP8_E4M3))
    return jax.tree.map(save_for_backward, quantize(values, FP8_E4M3, amax=amax))


def _by_cudnn(q: QuantizedArray, k: QuantizedArray, v: QuantizedArray, options: Options) -> tuple[jax.Array, jax.Array]:
    """Returns the codes of the output, without the scale of the values, and the log-sum-exp of the scores."""
    of_values = tensor_unit(v)
    scales = cudnn.Scales(
        of_queries=tensor_unit(q),
        of_keys=tensor_unit(k),
        of_values=of_values,
        of_weights=jnp.float32(1 / SCALE_OF_WEIGHTS),
        to_weights=jnp.float32(SCALE_OF_WEIGHTS),
        to_output=1 / of_values,
    )
    return cudnn.forward_fp8(fp8_values(q), fp8_values(k), fp8_values(v), scales, options)


def _written_out(
    q: QuantizedArray, k: QuantizedArray, v: QuantizedArray, options: Options
) -> tuple[jax.Array, jax.Array]:
    """Returns what `_by_cudnn` returns, up to the order of sums."""
    queries, keys, values = (fp8_values(x).astype(jnp.float32) for x in (q, k, v))
    scores = _scores(queries * tensor_unit(q), keys * tensor_unit(k), options)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - largest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    rounded = _in_e4m3(weights, SCALE_OF_WEIGHTS).astype(jnp.float32)
    mixed = jnp.einsum("bkgqs,bskd->bqkgd", rounded / (SCALE_OF_WEIGHTS * total), values)
    # the sum of rounded weights may exceed `total`, so an output may be larger than every value
    return jnp.reshape(_in_e4m3(mixed, 1.0), queries.shape), _by_query_head(largest + jnp.log(total))


def _in_e4m3(x: jax.Array, scale: float) -> jax.Array:
    """Returns `x * scale`, rounded to E4M3 and saturated.

    On GPUs, XLA removes a cast to FP8 and back (`xla_allow_excess_precision`), but not the codes of `quantize_fused`.
    """
    rows = jnp.reshape(x, (-1, x.shape[-1]))
    codes = quantize_fused(rows, FP8_E4M3, jnp.float32(FP8_E4M3.largest / scale))
    return jnp.reshape(fp8_values(codes), x.shape)


def _written_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    stats: jax.Array,
    out: jax.Array,
    of_out: jax.Array,
    options: Options,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what `cudnn.backward` returns, up to the order of sums."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    queries, keys, values, out, of_out = (x.astype(wide) for x in (q, k, v, out, of_out))
    kv_heads = k.shape[2]
    weights = jnp.exp(_scores(queries, keys, options) - _by_group(stats, kv_heads))
    of_groups, out, queries = (_grouped(x, kv_heads) for x in (of_out, out, queries))
    towards = jnp.einsum("bqkgd,bskd->bkgqs", of_groups, values)
    along = jnp.einsum("bqkgd,bqkgd->bkgq", of_groups, out)[..., None]
    of_scores = weights * (towards - along) * options.scale
    to_q = jnp.reshape(jnp.einsum("bkgqs,bskd->bqkgd", of_scores, keys), q.shape)
    to_k = jnp.einsum("bkgqs,bqkgd->bskd", of_scores, queries)
    to_v = jnp.einsum("bkgqs,bqkgd->bskd", weights, of_groups)
    return to_q.astype(q.dtype), to_k.astype(k.dtype), to_v.astype(v.dtype)


def _scores(queries: jax.Array, keys: jax.Array, options: Options) -> jax.Array:
    """Returns the scaled scores, `(batch, kv_heads, group, queries, keys)`; -inf where a query may not attend."""
    groups = _grouped(queries, keys.shape[2])
    scores = jnp.einsum("bqkgd,bskd->bkgqs", groups, keys) * options.scale
    ordered = in_order(queries.shape[1], keys.shape[1], options.causal, None)
    return scores if ordered is None else jnp.where(ordered, scores, -jnp.inf)


def _grouped(x: jax.Array, kv_heads: int) -> jax.Array:
    return jnp.reshape(x, (*x.shape[:2], kv_heads, -1, x.shape[-1]))


def _by_query_head(stats: jax.Array) -> jax.Array:
    batch, _, _, queries, _ = stats.shape
    return jnp.reshape(stats, (batch, -1, queries))


def _by_group(stats: jax.Array, kv_heads: int) -> jax.Array:
    batch, _, queries = stats.shape
    return jnp.reshape(stats, (batch, kv_heads, -1, queries, 1))
