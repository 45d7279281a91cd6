"""Provides the attention of models that are not made of gtp_jax's layers, on meshes that divide sequences too."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax.nnx.nn.dtypes import promote_dtype
from jax.sharding import PartitionSpec

from .._numbers import whole
from ..collectives import (
    SequenceExchange,
    attention_to_gathered_keys,
    check_sequence_exchange,
    exchange_of,
    parts_of_sequences,
    whole_sequences_of,
)
from ..mesh import Roles, current_roles, current_view, degree, degrees
from ..ops import attention, save_for_backward


def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: None = None,
    mask: jax.Array | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    local_window_size: int | None = None,
    segment_ids: jax.Array | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: jax.Array | None = None,
    broadcast_dropout: bool = True,
    deterministic: bool = False,
    dtype: jax.typing.DTypeLike | None = None,
    sequence_exchange: SequenceExchange | None = None,
    **others: Any,
) -> jax.Array:
    """Computes attention. Takes the place of `nnx.dot_product_attention` and of `jax.nn.dot_product_attention`, where
    the mesh divides the tokens of a sequence (`make_mesh(cp=...)`) and elsewhere:

        nnx.MultiHeadAttention(heads, width, attention_fn=gtp_jax.nn.attention_fn, rngs=rngs)

    On such a mesh, ranks exchange heads for whole sequences, or gather keys and values: see `sequence_exchange`. For a
    causal model, pass `is_causal=True` instead of a mask, for example by `functools.partial`: a mask has queries x
    keys elements, which every rank holds.

    Args:
        query: `(batch, queries, heads, head_dim)`.
        key: `(batch, keys, key-value heads, head_dim)`; their number divides that of the query heads.
        value: the same shape as `key`.
        bias: not supported; `None`.
        mask: boolean, true where a query may attend: `(batch or 1, heads or 1, queries or 1, keys)`, or `(queries or 1,
            keys)`. On a mesh that divides sequences, all heads share it. A query that may attend to no key has the
            output 0. If there are more than 2**30 queries x keys, only a mask of keys is allowed, whose queries are 1.
        is_causal: whether a query may not attend to later keys.
        scale: the factor of the scores; `head_dim ** -0.5` by default.
        local_window_size: how many positions away a key may be, to each side that `is_causal` leaves: a whole number.
        segment_ids: `(batch, sequence)` integers. Tokens attend only to tokens with the same id.
        dropout_rate: the fraction of attention weights that are dropped, unless `deterministic`.
        dropout_rng: the key for dropout. On a mesh that divides sequences, each rank folds its index into it.
        broadcast_dropout: must be `False` if weights are dropped: each head and example has a mask of its own.
        deterministic: whether nothing is dropped.
        dtype: the dtype to which query, key and value are cast; by default, that to which JAX promotes them.
        sequence_exchange: `"heads"` or `"keys"`, as in `Attention`; by default heads, if their numbers allow it.
        others: further options of the two functions. Only their defaults are allowed.

    Returns:
        `(batch, queries, heads, head_dim)`.

    Raises:
        ValueError: if an option is not supported; if the shapes do not fit; or if the mesh cannot divide sequences or
            heads.
    """
    _check_options(bias, local_window_size, others)
    check_sequence_exchange(sequence_exchange)
    drops = dropout_rate > 0 and not deterministic
    if drops and broadcast_dropout:
        raise ValueError(
            "`attention_fn` is asked to drop attention weights with one mask for all examples and heads "
            "(`broadcast_dropout=True`, the default of Flax). Pass `broadcast_dropout=False`, so that each has its own."
        )
    _check_shapes(query, key, value, mask)
    dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    q, k, v = (x.astype(dtype) for x in (query, key, value))
    options: dict[str, Any] = {
        "causal": is_causal,
        "window": None if local_window_size is None else int(local_window_size) + 1,
        "scale": scale,
        "dropout_rate": dropout_rate if drops else 0.0,
    }
    mask, segment_ids = (None if a is None else jnp.asarray(a) for a in (mask, segment_ids))
    inputs: dict[str, Any] = {"mask": mask, "segment_ids": segment_ids, "dropout_key": dropout_rng if drops else None}
    roles, view = current_roles(), current_view()
    axis = None if view == "plain" or roles.sequence not in jax.sharding.get_abstract_mesh().shape else roles.sequence
    if axis is None or degree(axis) == 1:
        return attention(q, k, v, **options, **inputs)
    if mask is not None and mask.ndim == 4 and mask.shape[1] != 1:
        raise ValueError(
            f"`mask` has the shape {mask.shape}, but {axis} = {degree(axis)} divides sequences, so that all heads must "
            "share one mask: dimension 1 must be 1."
        )
    on_rank = functools.partial(_on_rank, axis=axis, exchange=sequence_exchange, options=options)
    if view == "local":
        apart = tuple(name for name in (*roles.tokens, roles.tensor) if name is not None)
        return on_rank(q, k, v, inputs, apart)
    return _over_ranks(on_rank, q, k, v, inputs, axis, roles)


def _check_options(bias: Any, window: Any, others: dict[str, Any]) -> None:
    """Raises a `ValueError` for options of Flax's and JAX's functions that would change the result."""
    if bias is not None:
        raise ValueError("`attention_fn` got a `bias`, which it does not support. Pass a boolean `mask`.")
    if window is not None and ((size := whole(window)) is None or size < 0):
        raise ValueError(
            f"`local_window_size` is {window!r}; it must be a whole number, the same to each side that `is_causal` "
            "leaves. For another window, pass a boolean `mask`."
        )
    if others.get("module") is not None:
        raise ValueError(
            "`attention_fn` got a `module`, to sow the attention weights in, but it does not compute them all on one "
            "device. Call the layer without `sow_weights`."
        )
    for name, value in others.items():
        if value is not None and value is not False and value is not promote_dtype:
            raise ValueError(f"`attention_fn` got {name}={value!r}, which it does not support. Leave it out.")


def _check_shapes(q: jax.Array, k: jax.Array, v: jax.Array, mask: Any) -> None:
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(
            f"`attention_fn` takes (batch, sequence, heads, head_dim); got {q.shape}, {k.shape}, {v.shape}."
        )
    if v.shape != k.shape or (k.shape[0], k.shape[3]) != (q.shape[0], q.shape[3]) or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"query {q.shape}, key {k.shape}, value {v.shape}: key and value must have the same shape, with the batch "
            "and head_dim of the query, and a number of heads that divides that of the query."
        )
    if mask is not None and jnp.ndim(mask) not in (2, 4):
        raise ValueError(
            f"`mask` has the shape {jnp.shape(mask)}; it must be (batch or 1, heads or 1, queries, keys) or (queries, "
            "keys). Flax would take dimension 0 of three for the heads; add the dimension that is missing."
        )


def _on_rank(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    inputs: dict[str, Any],
    apart: tuple[str, ...],
    *,
    axis: str,
    exchange: SequenceExchange | None,
    options: dict[str, Any],
) -> jax.Array:
    """Returns this rank's part of the result, given its part of queries, keys and values, and the whole sequence of the
    other inputs.

    Ranks along the axes `apart` have different examples, tokens or heads, and different masks for dropout. Others
    compute the same, and need the same mask.
    """
    if (own := inputs["dropout_key"]) is not None:
        axes = tuple(name for name in apart if degree(name) > 1)
        inputs = {**inputs, "dropout_key": jax.random.fold_in(own, jax.lax.axis_index(axes))}
    if exchange_of(exchange, q.shape[2], k.shape[2], axis) == "keys":
        return attention_to_gathered_keys(q, k, v, axis, **options, **inputs)
    q, k, v = map(save_for_backward, whole_sequences_of(q, k, v, axis))
    return save_for_backward(parts_of_sequences(attention(q, k, v, **options, **inputs), axis))


def _over_ranks(
    on_rank: Any, q: jax.Array, k: jax.Array, v: jax.Array, inputs: dict[str, Any], axis: str, roles: Roles
) -> jax.Array:
    """Returns the result for global arrays, given the function that computes a rank's part of it."""
    for name, x in (("query", q), ("key", k)):
        if x.shape[1] % degree(axis):
            raise ValueError(
                f"`{name}` has shape {x.shape}; dimension 1 is the sequence and must be a multiple of {axis} = "
                f"{degree(axis)}. Pad the sequence."
            )
    names = jax.sharding.get_abstract_mesh().shape
    rows = tuple(name for name in roles.batch if name in names)
    batch = rows if q.shape[0] % degrees(rows) == 0 else None
    tensor = roles.tensor if roles.tensor in names else None
    tensor = tensor if q.shape[2] % degree(tensor) == 0 and k.shape[2] % degree(tensor) == 0 else None
    part = PartitionSpec(batch, axis, tensor)
    apart = tuple(name for name in (*(batch or ()), axis, tensor) if name is not None)
    given = {name: x for name, x in inputs.items() if x is not None}

    def spec(name: str, x: jax.Array) -> PartitionSpec:
        by_example = name == "segment_ids" or (name == "mask" and x.ndim > 2 and x.shape[0] > 1)
        return PartitionSpec(batch) if by_example else PartitionSpec()

    def compute(q: jax.Array, k: jax.Array, v: jax.Array, given: dict[str, Any]) -> jax.Array:
        return on_rank(q, k, v, dict.fromkeys(inputs) | given, apart)

    into = (part, part, part, {name: spec(name, x) for name, x in given.items()})
    return jax.shard_map(compute, in_specs=into, out_specs=part, check_vma=False)(q, k, v, given)
