"""Dot-product attention: cuDNN's kernels where they compute the same, otherwise written out in jax.numpy, or in blocks
if there are too many scores."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ...mesh import largest_attention_head, platform
from .._implementation import Implementation, runs_native
from .._one_row import is_one_row, one_row_einsum
from ._blocks import MOST_MASKED, MOST_SCORES, Dropout, Rule, forward_in_blocks
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
    head_dim, rate = q.shape[-1], dropout_rate
    _check(q, k, v, causal, window, mask, segment_ids, soft_cap, sinks, rate, dropout_key)
    first = _check_places(q, k, causal, window, query_position)
    if isinstance(scale, jax.Array):  # kernels need a scale that is known at compile time
        q, scale = (q * scale).astype(q.dtype), 1.0
    factor: float = head_dim**-0.5 if scale is None else scale
    lacks = cudnn_lacks(q.dtype, head_dim, soft_cap=soft_cap is not None, sinks=sinks is not None, dropout=rate > 0)
    # true if some query may have no key to attend to, not even its own
    unseeing = first is not None or mask is not None or isinstance(segment_ids, tuple)
    unseeing |= window is not None and q.shape[1] >= k.shape[1] + window  # the last query is that far from all keys
    masked = first is not None or mask is not None or segment_ids is not None
    if not lacks and masked and (q.shape[1] % 2 or k.shape[1] % 2):
        lacks = f"cuDNN supports masks over sequences of even length only; these are {q.shape[1]} and {k.shape[1]}"
    options: dict[str, Any] = {"causal": causal, "window": window}
    packs = segment_ids is not None and not unseeing and not packed_lacks(q, **options)
    scores = q.shape[1] * k.shape[1]
    if not lacks and not packs and scores > MOST_MASKED:
        lacks = _lacks_without_scores(q, k, mask, segment_ids is not None, first is not None, **options)
    native = runs_native("attention", implementation, lacks)
    if native and packs:
        return packed_attention(q, k, v, jnp.asarray(segment_ids), scale=factor, **options)
    if not native and scores > MOST_SCORES:
        dropout = Dropout(rate, dropout_key) if dropout_key is not None and rate else None
        rule = _rule(causal, window, first, mask, segment_ids)
        return forward_in_blocks(q, k, v, rule, scale=factor, soft_cap=soft_cap, sinks=sinks, dropout=dropout)[0]
    allowed = allowed_by(mask, segment_ids)
    if first is not None:
        allowed = both(allowed, in_order(q.shape[1], k.shape[1], causal, window, first))
        causal, window = False, None
    if native:
        return _by_cudnn(q, k, v, allowed, unseeing, causal=causal, window=window, scale=factor)
    ordered = in_order(q.shape[1], k.shape[1], causal, window)
    return _written_out(q, k, v, allowed, unseeing, ordered, factor, soft_cap, sinks, rate, dropout_key)


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


def _lacks_without_scores(
    q: jax.Array, k: jax.Array, mask: jax.Array | None, segments: bool, placed: bool, causal: bool, window: int | None
) -> str:
    """Returns why cuDNN would need an array of `(queries, keys)` other than the caller's mask; an empty string if it
    would not."""
    asked = {
        "the positions of queries among the keys": placed,
        "these segments": segments,
        "a mask of keys": mask is not None and mask.shape[-2] != q.shape[1],
        "a window": window is not None and (not causal or mask is not None),
    }
    if needs := [name for name, given in asked.items() if given]:
        return f"cuDNN reads {' and '.join(needs)} as an array of {q.shape[1]} queries x {k.shape[1]} keys"
    return ""


def _rule(causal: bool, window: int | None, first: Any, mask: jax.Array | None, segment_ids: Any) -> Rule:
    known = first is None or isinstance(first, int)
    pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    return Rule(
        causal,
        window,
        first=(first or 0) if known else 0,
        shift=None if known else jnp.asarray(first),
        mask=None if mask is None else allowed_by(jnp.asarray(mask), None),
        segments=None if segment_ids is None else (jnp.asarray(pair[0]), jnp.asarray(pair[1])),
    )


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
    if window is not None:  # cuDNN has no kernel for a window to both sides, or for a window with a mask
        allowed = both(allowed, None if ordered is None else ordered[None, None])
    if allowed is None:
        return jax.nn.dot_product_attention(q, k, v, **options)
    allowed = jnp.broadcast_to(allowed, (*allowed.shape[:2], q.shape[1], k.shape[1]))
    if not unseeing:
        return jax.nn.dot_product_attention(q, k, v, mask=allowed, **options)
    where = allowed if ordered is None else allowed & ordered
    some = jnp.any(where, axis=-1, keepdims=True)
    # The kernel adds a large negative number to masked scores, which may overflow if all scores of a row are masked. So
    # such a row attends to all keys, and its output is replaced by zeros.
    mixed = jax.nn.dot_product_attention(q, k, v, mask=allowed | ~some, **options)
    return jnp.where(jnp.swapaxes(some, 1, 2), mixed, 0)


_LARGEST_MASK = 2**30  # the most queries x keys of a mask

# Up to this number of keys, attention of a single query is faster on GPUs as sums of products than as matmuls.
_FEW_KEYS = 512


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
    # jax.nn's own XLA path computes the softmax in float32 for any input dtype; here float64 stays float64.
    batch, queries, heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    groups = jnp.reshape(q, (batch, queries, num_kv_heads, heads // num_kv_heads, head_dim))
    wide = jnp.promote_types(q.dtype, jnp.float32)
    one_row = is_one_row(batch, queries) and k.shape[1] <= _FEW_KEYS
    if one_row:
        scores = one_row_einsum("bqkgd,bskd->bkgqs", groups, k) * scale
    else:
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
    if unseeing and where is not None:  # the softmax of a row without keys is uniform; give it no value and no gradient
        probs = jnp.where(where, probs, 0)
    if dropout_rate:
        assert dropout_key is not None
        kept = jax.random.bernoulli(dropout_key, 1 - dropout_rate, probs.shape)
        probs = jnp.where(kept, probs / (1 - dropout_rate), 0)
    einsum = one_row_einsum if one_row else jnp.einsum
    return jnp.reshape(einsum("bkgqs,bskd->bqkgd", probs.astype(v.dtype), v), q.shape).astype(q.dtype)


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


def _check_places(q: jax.Array, k: jax.Array, causal: bool, window: int | None, position: Any) -> Any:
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
