"""Dot-product attention: cuDNN's where it computes the same, written out in jax.numpy elsewhere."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..mesh import largest_attention_head, platform
from ._implementation import Implementation, runs_native
from ._masks import allowed_by, both, by_group, in_order
from ._packed import packed_attention, packed_lacks


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

    The softmax is taken in at least float32. A query that may attend to no key gets zeros, and has no gradient.
    Written out, the scores of a head are an array of `(queries, keys)`; cuDNN never makes them.

    Args:
        q: `(batch, queries, heads, head_dim)`.
        k: `(batch, keys, num_kv_heads, head_dim)`; `num_kv_heads` divides `heads`.
        v: like `k`.
        causal: whether a query attends to no later key.
        window: how far a query sees: keys less than this many places away, its own included. With `causal` the last
            `window` keys, as in Mistral (arXiv 2310.06825).
        mask: boolean, true where a query may attend: `(queries, keys)`, `(batch, queries, keys)`, or
            `(batch, heads, queries, keys)` with 1 for what is alike for all.
        segment_ids: `(batch, sequence)` integers; tokens attend only to those of the same id. For queries and keys of
            different sequences a pair. Ids that are runs, such as documents behind one another, are fastest.
        scale: of the scores; `head_dim ** -0.5` by default.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)` (Gemma 2, arXiv 2408.00118).
        sinks: `(heads,)`, a logit that takes part in each softmax with no value behind it (gpt-oss).
        dropout_rate: the share of attention weights set to 0; the others grow by `1 / (1 - dropout_rate)`.
        dropout_key: of `jax.random`, needed for dropout.
        query_position: the place of the first query among the keys, for queries that continue a sequence whose earlier
            keys are cached: an integer, or integers `(batch,)`. The others follow it, and `causal` and `window` count
            from these places. By default the queries are all of the sequence. 0 with as many keys as queries gives the
            same bits.
        implementation: `"reference"`, written out; `"native"`, cuDNN's; or `None` for the best at hand. What cuDNN
            does not compute, `cudnn_lacks` says.

    Returns:
        `(batch, queries, heads, head_dim)`, in the dtype of `q`.

    Raises:
        ValueError: if arguments do not fit each other.
        NotImplementedError: if `implementation` is `"native"`, and cuDNN does not take these.
    """
    head_dim, rate = q.shape[-1], dropout_rate
    _check(q, k, v, causal, window, mask, segment_ids, soft_cap, sinks, rate, dropout_key)
    first = _check_places(q, k, causal, window, query_position)
    if isinstance(scale, jax.Array):  # kernels take a number that is known when they are compiled
        q, scale = (q * scale).astype(q.dtype), 1.0
    factor: float = head_dim**-0.5 if scale is None else scale
    lacks = cudnn_lacks(q.dtype, head_dim, soft_cap=soft_cap is not None, sinks=sinks is not None, dropout=rate > 0)
    allowed = allowed_by(mask, segment_ids)
    # true if a query may see no key, not even its own
    unseeing = first is not None or mask is not None or isinstance(segment_ids, tuple)
    if first is not None:
        allowed = both(allowed, in_order(q.shape[1], k.shape[1], causal, window, first))
        causal, window = False, None
    if not lacks and allowed is not None and (q.shape[1] % 2 or k.shape[1] % 2):
        lacks = f"cuDNN takes a mask over sequences of even length; these are {q.shape[1]} and {k.shape[1]}"
    if runs_native("attention", implementation, lacks):
        options: dict[str, Any] = {"causal": causal, "window": window}
        if not unseeing and segment_ids is not None and not packed_lacks(q, **options):
            return packed_attention(q, k, v, jnp.asarray(segment_ids), scale=factor, **options)
        return _by_cudnn(q, k, v, allowed, unseeing, causal=causal, window=window, scale=factor)
    ordered = in_order(q.shape[1], k.shape[1], causal, window)
    return _written_out(q, k, v, allowed, unseeing, ordered, factor, soft_cap, sinks, rate, dropout_key)


def cudnn_lacks(
    dtype: jax.typing.DTypeLike, head_dim: int, *, soft_cap: bool = False, sinks: bool = False, dropout: bool = False
) -> str:
    """Says why cuDNN, by `jax.nn.dot_product_attention` of jax 0.11.2 and 0.12.0, does not compute such attention on
    the devices at hand; nothing if it does.

    Causal and windowed attention run in its kernels, and segments where `packed_lacks` says nothing. A boolean mask, a
    window without `causal`, and other segments are an array of `(queries, keys)` that it reads.
    """
    extras = {"soft cap": soft_cap, "sinks": sinks, "dropout": dropout}
    asked = [name for name, wanted in extras.items() if wanted]
    if asked:
        return f"jax.nn has no {' and no '.join(asked)} in cuDNN's attention"
    if platform() != "gpu":
        return "cuDNN runs on GPUs"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN takes bfloat16 and float16 on GPUs, and this is {jnp.dtype(dtype)}"
    largest = largest_attention_head()
    if head_dim % 8 or head_dim > largest:
        return f"cuDNN takes heads of a multiple of 8 up to {largest} on these GPUs, and this is {head_dim}"
    return ""


def _by_cudnn(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    allowed: jax.Array | None,
    unseeing: bool,
    *,
    causal: bool,
    window: int | None,
    scale: float,
) -> jax.Array:
    options: dict[str, Any] = {"is_causal": causal, "scale": scale, "implementation": "cudnn"}
    if window is not None and causal and allowed is None:
        return jax.nn.dot_product_attention(q, k, v, local_window_size=(window - 1, 0), **options)
    ordered = in_order(q.shape[1], k.shape[1], causal, window)
    if window is not None:  # of a window to both sides, or beside a mask, cuDNN has no kernel
        allowed = both(allowed, None if ordered is None else ordered[None, None])
    if allowed is None:
        return jax.nn.dot_product_attention(q, k, v, **options)
    allowed = jnp.broadcast_to(allowed, (*allowed.shape[:2], q.shape[1], k.shape[1]))
    if not unseeing:
        return jax.nn.dot_product_attention(q, k, v, mask=allowed, **options)
    where = allowed if ordered is None else allowed & ordered
    some = jnp.any(where, axis=-1, keepdims=True)
    # The kernel adds a large negative number to masked scores, which may overflow where a row has no other: such a row
    # sees all keys, and its output is dropped.
    mixed = jax.nn.dot_product_attention(q, k, v, mask=allowed | ~some, **options)
    return jnp.where(jnp.swapaxes(some, 1, 2), mixed, 0)


def _written_out(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    allowed: jax.Array | None,
    unseeing: bool,
    ordered: jax.Array | None,
    scale: float,
    soft_cap: float | None,
    sinks: jax.Array | None,
    dropout_rate: float,
    dropout_key: jax.Array | None,
) -> jax.Array:
    # jax.nn's own XLA path takes the softmax in float32 whatever the inputs; here float64 stays float64.
    batch, queries, heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    groups = jnp.reshape(q, (batch, queries, num_kv_heads, heads // num_kv_heads, head_dim))
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", groups, k, preferred_element_type=wide) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    where = both(None if allowed is None else by_group(allowed, num_kv_heads), ordered)
    if where is not None:
        scores = jnp.where(where, scores, jnp.finfo(wide).min)
    if sinks is not None:
        logits = jnp.reshape(sinks.astype(wide), (num_kv_heads, -1, 1, 1))
        scores = jnp.concatenate([scores, jnp.broadcast_to(logits, (*scores.shape[:-1], 1))], axis=-1)
    probs = jax.nn.softmax(scores, axis=-1)
    if sinks is not None:
        probs = probs[..., :-1]
    if unseeing and where is not None:  # a row without keys is uniform, and gets no value and no gradient
        probs = jnp.where(where, probs, 0)
    if dropout_rate:
        assert dropout_key is not None
        kept = jax.random.bernoulli(dropout_key, 1 - dropout_rate, probs.shape)
        probs = jnp.where(kept, probs / (1 - dropout_rate), 0)
    return jnp.reshape(jnp.einsum("bkgqs,bskd->bqkgd", probs.astype(v.dtype), v), q.shape).astype(q.dtype)


def _check(
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
    (batch, queries, heads, head_dim), (keys, num_kv_heads) = q.shape, k.shape[1:3]
    if k.shape != (batch, keys, num_kv_heads, head_dim) or v.shape != k.shape or heads % num_kv_heads:
        raise ValueError(
            f"`q` {q.shape}, `k` {k.shape}, `v` {v.shape}: `k` and `v` have one shape, batch and head_dim are those of "
            "`q`, and their number of heads divides that of `q`."
        )
    check_choices(window=window, soft_cap=soft_cap, dropout_rate=dropout_rate)
    if mask is not None:
        check_mask(mask, batch, queries, keys, heads)
    if segment_ids is not None:
        pair = isinstance(segment_ids, tuple)
        shapes = tuple(ids.shape for ids in segment_ids) if pair else (segment_ids.shape,) * 2
        if shapes != ((batch, queries), (batch, keys)):
            raise ValueError(
                f"`segment_ids` has the shape {shapes if pair else shapes[0]}; ids of queries are {(batch, queries)} "
                f"and of keys {(batch, keys)}, a pair where these differ."
            )
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"`sinks` has the shape {sinks.shape}; it must be ({heads},), a logit for each query head.")
    if dropout_rate and dropout_key is None:
        raise ValueError(f"`dropout_rate` is {dropout_rate}, which needs a `dropout_key`.")


def _check_places(q: jax.Array, k: jax.Array, causal: bool, window: int | None, position: Any) -> Any:
    """Returns the place of the first query among the keys, if it decides what is seen; `None` if places are simply
    0, 1, ..."""
    queries, keys = q.shape[1], k.shape[1]
    if position is not None:
        _check_query_position(position, q.shape[0], queries, keys)
        whole = isinstance(position, int) and position == 0 and queries == keys
        return position if (causal or window is not None) and not whole else None
    if causal and queries != keys:
        raise ValueError(
            f"`causal` compares places in one sequence, and {queries} queries have {keys} keys. Pass the place of the "
            "first query among the keys as `query_position`."
        )
    return None


def _check_query_position(position: Any, batch: int, queries: int, keys: int) -> None:
    """Refuses a place of the first query that is no place among the keys.

    A value that is not known while a program is traced is not looked at: a query behind the last key sees all keys, and
    one ahead of the first key sees none.

    Raises:
        TypeError: if it is no integer.
        ValueError: naming its shape or value, and what is allowed.
    """
    if isinstance(position, bool) or not jnp.issubdtype(jnp.result_type(position), jnp.integer):
        raise TypeError(f"`query_position` is {position!r}; it must be an integer, or integers of shape ({batch},).")
    if jnp.shape(position) not in ((), (batch,)):
        raise ValueError(
            f"`query_position` has the shape {jnp.shape(position)}; it must be a scalar, or ({batch},), one place for "
            "each example."
        )
    if isinstance(position, Tracer):
        return
    places = np.asarray(position)  # known, even while a program is traced
    lowest, highest = int(places.min()), int(places.max())
    if lowest < 0 or highest + queries > keys:
        got = f"{lowest}" if lowest == highest else f"{lowest} to {highest}"
        raise ValueError(
            f"`query_position` is {got}; {queries} queries among {keys} keys begin at a place from 0 to "
            f"{keys - queries}."
        )


def check_mask(mask: Any, batch: int, queries: int, keys: int, heads: int) -> None:
    """Refuses a mask that is not boolean, or does not fit.

    Raises:
        ValueError: naming its shape or dtype, and what is allowed.
    """
    if mask.dtype != jnp.bool_:
        raise ValueError(
            f"`mask` is of {mask.dtype}; it must be boolean, true where a query may attend. Write `mask > 0`, or "
            "`bias == 0` of a mask that is added."
        )
    leading = {2: ((),), 3: ((batch,), (1,)), 4: tuple((b, h) for b in (batch, 1) for h in (heads, 1))}
    if mask.ndim not in leading or mask.shape[:-2] not in leading[mask.ndim] or mask.shape[-2:] != (queries, keys):
        raise ValueError(
            f"`mask` has the shape {mask.shape}; it must be {(queries, keys)}, {(batch, queries, keys)} or "
            f"{(batch, heads, queries, keys)}, where batch and heads may be 1."
        )


def check_choices(*, window: int | None, soft_cap: float | None, dropout_rate: float) -> None:
    """Refuses numbers out of range.

    Raises:
        ValueError: naming the argument, its value and what is allowed.
    """
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"`window` is {window!r}; it must be a number of keys, at least 1, or None for all.")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"`soft_cap` is {soft_cap}; it must be a number above 0, or None for none.")
    if not 0 <= dropout_rate < 1:
        raise ValueError(f"`dropout_rate` is {dropout_rate}; it must be at least 0 and below 1.")
