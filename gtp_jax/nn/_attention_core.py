"""Computes what an attention layer does between its projections: norms of queries and keys, rotary embedding and
attention itself."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.nn import initializers

from ..collectives import (
    SequenceExchange,
    attention_to_gathered_keys,
    check_sequence_exchange,
    exchange_of,
    parts_of_sequences,
    whole_sequences_of,
)
from ..layout import Layout, Split
from ..mesh import Roles, current_view, degree, sequence_axis
from ..ops import (
    RopeScaling,
    attention,
    attention_fp8,
    attention_fp8_lacks,
    check_choices,
    check_rotary,
    cudnn_lacks,
    rope,
    save_for_backward,
)
from ._cache import filled_from, seen_slots, with_token
from ._norm import Norm, make_norm, normalized
from ._reach import Reach
from ._weight import make_vector

_CACHED = (
    "{} while `gtp_jax.generation.generate` caches its keys and values. Add `positions`, `(batch, sequence)`, to the "
    "model's call and pass them to every `gtp_jax.Attention`, through a `Stack` as `shared`; do not pass masks or "
    "segments."
)


class AttentionCore(nnx.Module):
    """Maps the queries, keys and values of a rank's heads to the outputs of these heads.

    Arguments that are not listed here are as in `Attention`.

    Args:
        num_heads, num_kv_heads: the numbers of heads of all ranks together.
        queries: the layout of the kernel that computes the queries. tp divides the sinks in the same way as these query
            heads.
        keys: the layout of the kernel that computes the keys.
        roles: the roles of the mesh axes.
        dtype: the dtype of queries, keys and values.
        param_dtype: the dtype of the stored parameters.
        qk_norm: the norm of each head of queries and keys, without a shift; `None` for none.

    Attributes:
        reach: the window and the rotary embedding of calls that name no other.
        cached_keys, cached_values, cache_fills: the `Cache`s, in the copy of a model that `gtp_jax.generation.generate`
            calls; otherwise `None`.
        kv_heads: the number of key-value heads of all ranks together, including the heads of padding on ranks that own
            fewer.
        deterministic: whether dropout is off; set by `nnx.Module.eval` and `nnx.Module.train`.

    Raises:
        ValueError: if `window`, `soft_cap`, `dropout_rate`, `sequence_exchange` or an argument of the rotary embedding
            is not allowed; or if `rope_scaling` or `rotary_dim` is given without `rope_theta`.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        queries: Layout,
        keys: Layout,
        roles: Roles,
        dtype: jax.typing.DTypeLike,
        param_dtype: jax.typing.DTypeLike,
        epsilon: float,
        causal: bool,
        window: int | None = None,
        soft_cap: float | None = None,
        scale: float | None = None,
        qk_norm: Norm,
        sinks: bool,
        dropout_rate: float,
        rope_theta: float | None,
        rope_scaling: RopeScaling | None = None,
        rotary_dim: int | None = None,
        sequence_exchange: SequenceExchange | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        check_choices(window=window, soft_cap=soft_cap, dropout_rate=dropout_rate)
        check_sequence_exchange(sequence_exchange)
        if rope_theta is not None:
            check_rotary(head_dim, rotary_dim, rope_theta, rope_scaling)
        elif rope_scaling is not None or rotary_dim is not None:
            raise ValueError(
                "`rope_scaling` and `rotary_dim` apply only to a rotary embedding, but `rope_theta` is "
                "None. Pass `rope_theta`, or remove them."
            )
        self.head_dim, self.dtype, self.epsilon, self.causal = head_dim, jnp.dtype(dtype), epsilon, causal
        self.soft_cap, self.scale, self.dropout_rate = soft_cap, scale, dropout_rate
        self.reach = Reach(window=window, rope_theta=rope_theta, rope_scaling=rope_scaling)
        self.rotary_dim = rotary_dim
        self.roles = roles
        self.sequence_exchange: SequenceExchange | None = sequence_exchange
        self.deterministic = False
        assert keys.split is not None
        self.kv_heads = keys.split.width * len(keys.split.owners) // head_dim
        self.cached_keys: Any = nnx.data(None)
        self.cached_values: Any = nnx.data(None)
        self.cache_fills: Any = nnx.data(None)
        self.qk_norm: Norm = qk_norm
        self.query_scale, self.key_scale = (make_norm(qk_norm, head_dim, rngs, param_dtype)[0] for _ in "qk")
        split = queries.split
        assert split is not None
        # if the sinks are stored whole on every tp rank, each rank slices out those of its own heads in the call
        self.split = (
            Split(num_heads, num_heads // num_kv_heads, split.owners, split.axis) if queries.takes_part else None
        )
        self.sinks: Any = nnx.data(None)
        if sinks:
            self.sinks = make_vector(num_heads, initializers.zeros, rngs.params(), param_dtype, behind=queries)
        self.rngs: Any = rngs["dropout"].fork() if dropout_rate else nnx.data(None)

    def set_view(self, deterministic: bool | None = None) -> None:
        """Sets whether dropout is off; `None` changes nothing. `nnx.view` calls this method."""
        if deterministic is not None:
            self.deterministic = deterministic

    def dropout_key(self, deterministic: bool | None, key: jax.Array | None) -> jax.Array | None:
        """Returns the key for the dropout of a call: `key` if it is given, otherwise the next key of the module's own
        stream. Returns `None` if nothing is dropped."""
        if not self.dropout_rate or (self.deterministic if deterministic is None else deterministic):
            return None
        return self.rngs() if key is None else key

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        reach: Reach,
        positions: jax.Array | None = None,
        segment_ids: Any = None,
        mask: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        fp8: bool = False,
    ) -> jax.Array:
        """Returns the outputs of the heads, in the shape of the queries, given queries, keys and values, each `(batch,
        sequence, heads, head_dim)`. Keys and values may have fewer heads, and another sequence length.

        With `fp8`, attention multiplies in FP8 in forward, unless queries attend to cached keys.

        Raises:
            ValueError: if shapes are not consistent with each other; if `mask` has four dimensions and dimension 1 is
                not 1; with `fp8`, if this attention has an option or an input that FP8 does not support; or, in the
                copy of a model that `gtp_jax.generation.generate` calls, if there is a mask, there are segments, there
                are no positions, or a call that follows the first has more than one token per sequence.
        """
        if mask is not None and mask.ndim == 4 and mask.shape[1] != 1:
            raise ValueError(f"`mask` has the shape {mask.shape}; all heads share one mask, so dimension 1 must be 1.")
        axis = sequence_axis(self.roles, q.ndim) if current_view() == "local" else None
        given: dict[str, Any] = {"positions": positions, "segment_ids": segment_ids, "mask": mask}
        given |= {"dropout_key": dropout_key, "fp8": fp8, "reach": reach}
        if axis is None:
            return self._of_sequences(q, k, v, self._sinks(), None, **given)
        self._check_not_cached(axis)
        if exchange_of(self.sequence_exchange, q.shape[2], k.shape[2], axis) == "keys":
            return self._of_sequences(q, k, v, self._sinks(), axis, **given)
        q, k, v = whole_sequences_of(q, k, v, axis)
        y = self._of_sequences(q, k, v, self._sinks(axis), None, **given)
        # the output projection's weight gradient reads the part, attention's backward the whole: neither is exchanged
        # again
        return save_for_backward(parts_of_sequences(y, axis))

    def _check_not_cached(self, axis: str) -> None:
        if self.cached_keys is not None:
            raise ValueError(
                f"`gtp_jax.generation.generate` caches keys and values of whole sequences, but {axis} = {degree(axis)} "
                f"divides sequences. Generate on a mesh without {axis}."
            )

    def _of_sequences(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        sinks: jax.Array | None,
        axis: str | None,
        *,
        positions: jax.Array | None,
        segment_ids: Any,
        mask: jax.Array | None,
        dropout_key: jax.Array | None,
        fp8: bool,
        reach: Reach,
    ) -> jax.Array:
        """Returns the outputs of the heads for whole sequences; see `__call__`. With an `axis`, queries, keys, values
        and the result are this rank's parts of sequences that its ranks divide."""
        if fp8:
            self._check_fp8(mask is not None, segment_ids is not None, dropout_key is not None, axis, reach)
        q = normalized(self.qk_norm, q, self.query_scale, None, self.epsilon)
        k = normalized(self.qk_norm, k, self.key_scale, None, self.epsilon)
        if reach.rope_theta is not None:
            if axis is not None:
                positions = _of_part(positions, q.shape[1], axis)
            turn: dict[str, Any] = {"positions": positions, "scaling": reach.rope_scaling}
            q, k = (rope(x, theta=reach.rope_theta, rotary_dim=self.rotary_dim, **turn) for x in (q, k))
        options: dict[str, Any] = {"scale": self.scale, "soft_cap": self.soft_cap, "sinks": sinks}
        if self.cached_keys is not None:
            if mask is not None or segment_ids is not None:
                raise ValueError(_CACHED.format("the model passes a mask or segments to attention"))
            if positions is None:
                raise ValueError(_CACHED.format("the model calls attention without `positions`"))
            if self.reach.window not in (None, reach.window):
                raise ValueError(
                    f"attention with a window of {self.reach.window} is called with `reach.window` {reach.window} "
                    f"while `gtp_jax.generation.generate` caches the last {self.reach.window} tokens. Build it with "
                    "`window=None` and pass a `reach` with every window."
                )
            if self.cached_keys.get_metadata()["filled"]:
                return self._with_cached(q, k, v, positions, reach.window, options)
            self._fill(k, v, positions)
        if fp8:
            return attention_fp8(q, k, v, causal=self.causal, scale=self.scale)
        attend: Any = attention if axis is None else functools.partial(attention_to_gathered_keys, axis=axis)
        return attend(
            save_for_backward(q),
            save_for_backward(k),
            save_for_backward(v),
            causal=self.causal,
            window=reach.window,
            mask=mask,
            segment_ids=segment_ids,
            dropout_rate=0.0 if dropout_key is None else self.dropout_rate,
            dropout_key=self._of_rank(dropout_key),
            **options,
        )

    def _check_fp8(self, mask: bool, segments: bool, dropout: bool, axis: str | None, reach: Reach) -> None:
        if axis is not None:
            raise ValueError(
                f"the recipe asks for attention in FP8, which takes whole sequences, but ranks of {axis} = "
                f"{degree(axis)} exchange keys. Choose a degree that divides the heads of a rank, with "
                "`sequence_exchange='heads'`, or pass `attention=False` to the recipe."
            )
        options = {"window": reach.window is not None, "soft_cap": self.soft_cap is not None}
        options |= {"sinks": self.sinks is not None, "mask": mask, "segment_ids": segments, "dropout": dropout}
        if lacks := [f"`{name}`" for name, given in options.items() if given]:
            raise ValueError(
                f"the recipe asks for attention in FP8, which does not support {' and '.join(lacks)}. Pass "
                "`attention=False` to the recipe, or name this module in its `override`, with "
                "`gtp_jax.FP8(matmuls=True)`."
            )

    def _fill(self, k: jax.Array, v: jax.Array, positions: jax.Array) -> None:
        """Fills the caches with the keys and values of a call in which all sequences begin."""
        self.cache_fills.set_value(self.cache_fills.get_value() + 1)
        places = jnp.broadcast_to(positions, k.shape[:2])
        for cache, x in ((self.cached_keys, k), (self.cached_values, v)):
            cache.set_value(filled_from(x, places, cache.get_value().shape[1]))

    def _with_cached(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        positions: jax.Array,
        window: int | None,
        options: dict[str, Any],
    ) -> jax.Array:
        """Adds the keys and values of one token per sequence to the caches, and returns the outputs of the heads for
        these tokens, which attend to all cached tokens in the window, including themselves.

        Raises:
            ValueError: if there is more than one token per sequence.
        """
        if q.shape[1] != 1:
            raise ValueError(
                f"attention is called with {q.shape[1]} tokens per sequence while `gtp_jax.generation.generate` "
                "generates one at a time. The model must not change the length of its input."
            )
        places = jnp.broadcast_to(positions, k.shape[:2])[:, 0]
        for cache, x in ((self.cached_keys, k), (self.cached_values, v)):
            cache.set_value(with_token(cache.get_value(), x, places))
        keys, values = self.cached_keys.get_value(), self.cached_values.get_value()
        if self.reach.window is None:  # there is a slot for every token
            return attention(q, keys, values, causal=True, window=window, query_position=places, **options)
        return attention(q, keys, values, mask=seen_slots(places, keys.shape[1])[:, None], **options)

    def lacks(self) -> str:
        """Returns why cuDNN does not support this attention on the current devices; an empty string if it does. See
        `ops.cudnn_lacks`."""
        return cudnn_lacks(
            self.dtype,
            self.head_dim,
            soft_cap=self.soft_cap is not None,
            sinks=self.sinks is not None,
            dropout=self.dropout_rate > 0,
        )

    def lacks_fp8(self) -> str:
        """Returns why cuDNN does not support heads of this size and dtype in FP8 on the current devices; an empty
        string if it does, for sequences of a multiple of 128. See `ops.attention_fp8_lacks`."""
        one = jax.ShapeDtypeStruct((1, 128, 1, self.head_dim), self.dtype)
        return attention_fp8_lacks(one, one)

    def _sinks(self, axis: str | None = None) -> jax.Array | None:
        """Returns the sinks of this rank's heads, or of those that it has after ranks of `axis` exchange heads."""
        if self.sinks is None:
            return None
        sinks = self.sinks.get_value()
        sinks = sinks if self.split is None else self.split.take(sinks, 0)
        if axis is None:
            return sinks
        count = sinks.shape[0] // degree(axis)
        return lax.dynamic_slice_in_dim(sinks, lax.axis_index(axis) * count, count)

    def _of_rank(self, key: jax.Array | None) -> jax.Array | None:
        """Folds this rank's index into a key for dropout, so that ranks with different examples or heads draw different
        bits. Outside a `shard_map`, or if there are no such ranks, returns the key unchanged; `None` if there is no
        key."""
        axes = [axis for axis in (*self.roles.tokens, self.roles.tensor) if axis is not None and degree(axis) > 1]
        if key is None or current_view() != "local" or not axes:
            return key
        return jax.random.fold_in(key, lax.axis_index(tuple(axes)))


def _of_part(positions: jax.Array | None, part: int, axis: str) -> jax.Array:
    """Returns the positions of the tokens of this rank's part, given those of whole sequences; by default 0, 1, ..."""
    first = lax.axis_index(axis) * part
    if positions is None:
        return first + jnp.arange(part)
    if positions.shape[-1] != part * degree(axis):
        raise ValueError(
            f"`positions` has the shape {positions.shape}; its last dimension must be that of whole sequences, "
            f"{part * degree(axis)}."
        )
    return lax.dynamic_slice_in_dim(positions, first, part, positions.ndim - 1)
