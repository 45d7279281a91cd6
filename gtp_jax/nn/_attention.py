"""Provides the self-attention and cross-attention layers of transformer blocks."""

from __future__ import annotations

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from .._numbers import is_size
from ..collectives import SequenceExchange
from ..mesh import degree
from ..ops import RopeScaling, positions_of
from ._attention_core import AttentionCore
from ._dense import Dense, LayerNormDense
from ._layer import Layer, between_layers
from ._norm import Norm
from ._options import DenseOptions
from ._reach import Reach


class Attention(Layer):
    """Self-attention with grouped queries (Ainslie et al. 2023, arXiv 2305.13245) and a rotary embedding, unless
    `rope_theta` is `None`. Normalizes its input first, unless `norm` is `None`.

    `gtp_jax.explain` reports whether cuDNN kernels are used.

    Args:
        features: the size of the input and of the output.
        num_heads: the number of query heads. Query heads that share a key-value head form a group; tp divides whole
            groups among its ranks.
        num_kv_heads: the number of key-value heads; `num_heads` by default. It must divide `num_heads`, and be at least
            the tp degree.
        head_dim: the size of a head; `features // num_heads` by default.
        causal: whether tokens attend only to themselves and to earlier tokens.
        window: the size of the attention window: a token attends to keys less than this many positions away, including
            the key at its own position. With `causal`, these are the last `window` keys.
        soft_cap: if given, scores become `soft_cap * tanh(score / soft_cap)`, as in Gemma 2.
        qk_norm: whether to normalize each head of queries and keys by RMSNorm, as in Qwen3; with
            `norm="zero_centered_rms"`, by that norm, as in Gemma 3.
        sinks: whether to learn, for each head, a logit that takes part in the softmax but has no value, as in gpt-oss.
        scale: the factor of the scores; `head_dim ** -0.5` by default.
        dropout_rate: the fraction of attention weights that are dropped in training, with keys from the `dropout`
            stream of `rngs`. On a mesh, each rank folds its index into the key, so that dropout masks differ from those
            without a mesh.
        rope_theta: the base of the rotary wavelengths; `None` for no rotary embedding.
        rope_scaling: how the rotary frequencies are scaled, if at all.
        rotary_dim: the number of leading dimensions of each head that are rotated; all by default.
        norm: the norm of the input, as in `LayerNormDense`.
        epsilon: the epsilon of all norms.
        qkv_bias: whether queries, keys and values have biases, as in Qwen2; the option `use_bias` by default. Whether
            the output has a bias depends on `use_bias` alone.
        sequence_exchange: what ranks that divide sequences exchange: `"heads"`, so that each has whole sequences of a
            part of the heads, or `"keys"`, so that each has its part of the queries, and all keys and values. By
            default heads, if their numbers allow it.
        sequence_parallel: whether to shard activations along the sequence, as in `Dense`.
        rngs: the random streams; `params` is used, and also `dropout` if `dropout_rate` is not 0.
        options: further arguments for the projections `qkv` and `out`; see `Dense`.

    Raises:
        ValueError: if there are fewer key-value heads than tp ranks, or if an argument is out of range or not
            consistent with the others.
    """

    context_parallel = True

    def __init__(
        self,
        features: int,
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
        window: int | None = None,
        soft_cap: float | None = None,
        qk_norm: bool = False,
        sinks: bool = False,
        scale: float | None = None,
        dropout_rate: float = 0.0,
        rope_theta: float | None = 10_000.0,
        rope_scaling: RopeScaling | None = None,
        rotary_dim: int | None = None,
        norm: Norm = "rms",
        epsilon: float = 1e-6,
        qkv_bias: bool | None = None,
        sequence_exchange: SequenceExchange | None = None,
        sequence_parallel: bool = True,
        rngs: nnx.Rngs,
        **options: Unpack[DenseOptions],
    ) -> None:
        super().__init__()
        num_heads, num_kv_heads, head_dim = _heads(
            features, num_heads, num_kv_heads, head_dim, degree(self.roles.tensor)
        )
        shared: dict[str, Any] = {"sequence_parallel": sequence_parallel, "rngs": rngs, **options}
        sizes = {"query": num_heads * head_dim, "key": num_kv_heads * head_dim, "value": num_kv_heads * head_dim}
        group = num_heads // num_kv_heads * head_dim  # the features of the queries that share a key-value head
        units = {"query": group, "key": head_dim, "value": head_dim}
        # if tp divides the heads unevenly, ranks with fewer heads are padded with whole heads of zeros, whose queries
        # attend only to keys and values of zeros
        of_qkv = shared if qkv_bias is None else {**shared, "use_bias": qkv_bias}
        self.qkv = LayerNormDense(features, sizes, norm=norm, epsilon=epsilon, units=units, padding_value=0.0, **of_qkv)
        self.out = Dense(num_heads * head_dim, features, parallel="row", units=group, **shared)
        self.core = AttentionCore(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            queries=self.qkv.layouts[0],
            keys=self.qkv.layouts[1],
            roles=self.roles,
            dtype=self.qkv.dtype,
            param_dtype=options.get("param_dtype", jnp.float32),
            epsilon=epsilon,
            causal=causal,
            window=window,
            soft_cap=soft_cap,
            scale=scale,
            qk_norm=_of_heads(qk_norm, norm),
            sinks=sinks,
            dropout_rate=dropout_rate,
            sequence_exchange=sequence_exchange,
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            rotary_dim=rotary_dim,
            rngs=rngs,
        )
        self.sequence_parallel = sequence_parallel

    def __call__(
        self,
        x: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        mask: jax.Array | None = None,
        reach: Reach | None = None,
        deterministic: bool | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Maps `(batch, sequence, features)` to the same shape.

        Inside a `shard_map`, `positions`, `segment_ids` and `mask` cover this rank's examples and the whole sequence,
        even if `x` is sharded along the sequence.

        Args:
            x: the input.
            positions: the positions for the rotary embedding, `(batch, sequence)` or `(sequence,)`. By default
                `positions_of(segment_ids)`, or 0, 1, ... without segments.
            segment_ids: `(batch, sequence)` integers, such as numbers of documents. Tokens attend only to tokens with
                the same id.
            mask: boolean, true where a token may attend: `(sequence, sequence)`, the same for all examples; `(batch,
                sequence, sequence)`; or `(batch, 1, sequence, sequence)`, the same for all heads. The dimension before
                the last may be 1, for a mask of keys. For a token that may attend to no token, the outputs of the heads
                are zero.
            reach: the window and the rotary embedding of this call; by default, those of the module.
            deterministic: whether dropout is off; by default, `core.deterministic`, which `nnx.Module.eval` and
                `nnx.Module.train` set.
            dropout_key: the key for dropout; by default, the next key of the stream that the module keeps.

        Raises:
            ValueError: if the shapes are not consistent with each other; or if the recipe asks for attention in FP8,
                which does not support an option or an input.
        """
        if x.ndim != 3:
            raise ValueError(f"Attention takes (batch, sequence, features); got shape {x.shape}.")
        key = self.core.dropout_key(deterministic, dropout_key)
        given = {"positions": positions, "segment_ids": segment_ids, "mask": mask, "dropout_key": key}
        return super().__call__(x, deterministic=key is None, reach=reach or self.core.reach, **given)

    def local(self, x: jax.Array, *, deterministic: bool, reach: Reach, **inputs: Any) -> jax.Array:
        del deterministic  # without dropout, the key is `None`
        if inputs["positions"] is None and inputs["segment_ids"] is not None and reach.rope_theta is not None:
            inputs["positions"] = positions_of(inputs["segment_ids"])
        by_head = {name: _by_head(y, self.core.head_dim) for name, y in self.qkv(x).items()}
        q, k, v = (by_head[name] for name in ("query", "key", "value"))
        mixed = self.core(q, k, v, reach=reach, fp8=_in_fp8(self.out), **inputs)
        return self.out(jnp.reshape(mixed, (*mixed.shape[:2], -1)))

    def partition_of_input(self, name: int | str, array: Any) -> PartitionSpec:
        return _partition(self, name, array)


class CrossAttention(Layer):
    """Attention to a memory: the output of another network, such as an encoder.

    Queries are projections of the normalized input; keys and values are projections of the memory, which is not
    normalized.

    Args:
        features: the size of the input and of the output.
        memory_features: the number of features of the memory; `features` by default.

    The other arguments are as in `Attention`. `CrossAttention` has no arguments for causal attention, windows, rotary
    embeddings or separate biases of queries, keys and values.

    Raises:
        ValueError: as for `Attention`.
    """

    context_parallel = True

    def __init__(
        self,
        features: int,
        *,
        num_heads: int,
        memory_features: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        soft_cap: float | None = None,
        qk_norm: bool = False,
        sinks: bool = False,
        scale: float | None = None,
        dropout_rate: float = 0.0,
        sequence_exchange: SequenceExchange | None = None,
        norm: Norm = "rms",
        epsilon: float = 1e-6,
        sequence_parallel: bool = True,
        rngs: nnx.Rngs,
        **options: Unpack[DenseOptions],
    ) -> None:
        super().__init__()
        num_heads, num_kv_heads, head_dim = _heads(
            features, num_heads, num_kv_heads, head_dim, degree(self.roles.tensor)
        )
        shared: dict[str, Any] = {"sequence_parallel": sequence_parallel, "rngs": rngs, **options}
        group = num_heads // num_kv_heads * head_dim
        of_memory = {"key": num_kv_heads * head_dim, "value": num_kv_heads * head_dim}
        size = features if memory_features is None else memory_features
        self.query = LayerNormDense(
            features, num_heads * head_dim, norm=norm, epsilon=epsilon, units=group, padding_value=0.0, **shared
        )
        self.kv = Dense(size, of_memory, parallel="column", units=head_dim, padding_value=0.0, **shared)
        self.out = Dense(num_heads * head_dim, features, parallel="row", units=group, **shared)
        self.core = AttentionCore(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            queries=self.query.layouts[0],
            keys=self.kv.layouts[0],
            roles=self.roles,
            dtype=self.query.dtype,
            param_dtype=options.get("param_dtype", jnp.float32),
            epsilon=epsilon,
            causal=False,
            soft_cap=soft_cap,
            scale=scale,
            qk_norm=_of_heads(qk_norm, norm),
            sinks=sinks,
            dropout_rate=dropout_rate,
            sequence_exchange=sequence_exchange,
            rope_theta=None,
            rngs=rngs,
        )
        self.sequence_parallel = sequence_parallel

    def __call__(
        self,
        x: jax.Array,
        memory: jax.Array,
        *,
        segment_ids: tuple[jax.Array, jax.Array] | None = None,
        mask: jax.Array | None = None,
        deterministic: bool | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Maps `(batch, sequence, features)` to the same shape.

        Args:
            x: the input.
            memory: the memory, `(batch, memory, memory_features)`. Inside a `shard_map` it is sharded along its
                sequence like `x`.
            segment_ids: the segment ids of `x` and those of the memory, `(batch, sequence)` and `(batch, memory)`.
                Tokens of `x` attend only to tokens of the memory with the same id.
            mask: boolean, true where a token may attend: `(batch, sequence, memory)`, or one of the other shapes that
                `Attention` accepts, with the length of the memory as the last dimension.
            deterministic: as in `Attention`.
            dropout_key: as in `Attention`.

        Raises:
            ValueError: if the shapes are not consistent with each other; or if the recipe asks for attention in FP8,
                which does not support an option or an input.
        """
        if x.ndim != 3 or memory.ndim != 3:
            raise ValueError(
                f"CrossAttention takes (batch, sequence, features) and (batch, memory, features); got {x.shape} and "
                f"{memory.shape}."
            )
        key = self.core.dropout_key(deterministic, dropout_key)
        given: dict[str, Any] = {"segment_ids": segment_ids, "mask": mask, "dropout_key": key}
        return super().__call__(x, memory=memory, deterministic=key is None, **given)

    def local(self, x: jax.Array, *, memory: jax.Array, deterministic: bool, **inputs: Any) -> jax.Array:
        del deterministic  # without dropout, the key is `None`
        q = _by_head(self.query(x), self.core.head_dim)
        kv = self.kv(memory)
        k, v = (_by_head(kv[name], self.core.head_dim) for name in ("key", "value"))
        mixed = self.core(q, k, v, reach=self.core.reach, fp8=_in_fp8(self.out), **inputs)
        return self.out(jnp.reshape(mixed, (*mixed.shape[:2], -1)))

    def partition_of_input(self, name: int | str, array: Any) -> PartitionSpec:
        if name == "memory":
            return between_layers(self.roles, array.ndim, self.sequence_parallel)
        return _partition(self, name, array)


def _of_heads(qk_norm: bool, norm: Norm) -> Norm:
    """Returns the norm of each head of queries and keys, given the norm of the input."""
    if not qk_norm:
        return None
    return norm if norm == "zero_centered_rms" else "rms"


def _in_fp8(out: Dense) -> bool:
    """Returns whether the recipe of the output projection asks for attention in FP8."""
    return out.operands is not None and out.operands.attention


def _by_head(x: jax.Array, head_dim: int) -> jax.Array:
    return jnp.reshape(x, (*x.shape[:-1], -1, head_dim))


def _partition(layer: Layer, name: int | str, array: Any) -> PartitionSpec:
    """Returns the partition, in global view, of an input after the first. A mask or positions that all examples share
    are replicated."""
    alike = {"mask": array.ndim == 2 or array.shape[0] == 1, "positions": array.ndim == 1} if array.ndim else {}
    return PartitionSpec() if alike.get(str(name)) else Layer.partition_of_input(layer, name, array)


def _heads(
    features: int, num_heads: int, num_kv_heads: int | None, head_dim: int | None, tp: int
) -> tuple[int, int, int]:
    """Returns the numbers of query heads and of key-value heads, and the size of a head.

    Raises:
        ValueError: if `check_heads` refuses the numbers, or the size is not a whole number of at least 1.
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    check_heads(num_heads, num_kv_heads, tp)
    if head_dim is None:
        if features % num_heads:
            raise ValueError(f"`num_heads` {num_heads} does not divide `features` {features}; pass `head_dim` as well.")
        head_dim = features // num_heads
    if not is_size(head_dim):
        raise ValueError(f"`head_dim` is {head_dim}; it must be a whole number of at least 1.")
    return int(num_heads), int(num_kv_heads), int(head_dim)


def check_heads(num_heads: int, num_kv_heads: int, tp: int) -> None:
    """Checks that the query heads can be divided into groups of equal size, and that the number of groups is at least
    the degree of tp.

    Raises:
        ValueError: if not, or if a number is not a whole number of at least 1. The message names the numbers.
    """
    if not (is_size(num_heads) and is_size(num_kv_heads)):
        raise ValueError(
            f"`num_heads` is {num_heads} and `num_kv_heads` is {num_kv_heads}; both must be whole numbers of at "
            "least 1."
        )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"`num_kv_heads` {num_kv_heads} does not divide `num_heads` {num_heads}; every key-value head must serve "
            "the same number of query heads."
        )
    if num_kv_heads < tp:
        raise ValueError(
            f"tp {tp} exceeds the number of key-value heads, {num_kv_heads} ({num_heads} query heads). Choose a tp "
            f"degree of at most {num_kv_heads}, and shard weights further over gtp instead."
        )
