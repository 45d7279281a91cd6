"""The attention half of a transformer block, and attention to another sequence."""

from __future__ import annotations

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from ..mesh import degree
from ..ops import RopeScaling, positions_of
from ._attention_core import AttentionCore
from ._dense import Dense, LayerNormDense, Norm
from ._layer import Layer, between_layers
from ._options import DenseOptions


class Attention(Layer):
    """Self-attention with grouped queries (Ainslie et al. 2023, arXiv 2305.13245) and rotary embedding.

    Where it runs in cuDNN's kernels, `gtp_jax.explain` says.

    Args:
        features: size of the input and of the output.
        num_heads: query heads, divided among tp ranks with the key-value head that they share.
        num_kv_heads: key and value heads; divides `num_heads`, and is at least tp. All heads by default.
        head_dim: `features // num_heads` by default.
        causal: whether a token attends to no later one.
        window: how many keys a token sees, its own included; to both sides if not `causal`.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`, as in Gemma 2.
        qk_norm: normalise each head of queries and keys by RMSNorm, as in Qwen3.
        sinks: learn a logit for each head that takes part in its softmax with no value behind it, as in gpt-oss.
        scale: of the scores; `head_dim ** -0.5` by default.
        dropout_rate: the share of attention weights dropped in training, by the `dropout` stream of `rngs`. Each rank
            folds its place on the mesh into the key, so that masks differ from those without a mesh.
        rope_theta: base of the rotary wavelengths; `None` for no rotary embedding.
        rope_scaling: of the rotary frequencies.
        rotary_dim: how many of the first dimensions of a head are rotated; all by default.
        norm: of the input, as in `LayerNormDense`.
        epsilon: of all norms.
        qkv_bias: whether queries, keys and values have biases, as in Qwen2; by default `use_bias`, an option, which
            gives one to the output as well.
        sequence_parallel: as in `Dense`.
        rngs: the `params` stream is used, and `dropout` where there is any.
        options: passed to both `Dense` layers.

    Raises:
        ValueError: if there are fewer key-value heads than tp ranks, or arguments do not fit each other.
    """

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
        sequence_parallel: bool = True,
        rngs: nnx.Rngs,
        **options: Unpack[DenseOptions],
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        head_dim = _head_dim(features, num_heads, num_kv_heads, head_dim, degree(self.roles.tensor))
        shared: dict[str, Any] = {"sequence_parallel": sequence_parallel, "rngs": rngs, **options}
        sizes = {"query": num_heads * head_dim, "key": num_kv_heads * head_dim, "value": num_kv_heads * head_dim}
        group = num_heads // num_kv_heads * head_dim  # the features of the queries that share a key-value head
        units = {"query": group, "key": head_dim, "value": head_dim}
        # padding is whole heads of zeros, which attend to nothing but zeros
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
            qk_norm=qk_norm,
            sinks=sinks,
            dropout_rate=dropout_rate,
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
        deterministic: bool | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Maps `(batch, sequence, features)` to the same shape.

        Inside a `shard_map` positions, segments and masks are of this rank's examples, and of the whole sequence even
        where `x` is sharded along it.

        Args:
            x: the input.
            positions: `(batch, sequence)` or `(sequence,)`, for the rotary embedding. By default those of
                `positions_of(segment_ids)`, or 0, 1, ... without segments.
            segment_ids: `(batch, sequence)` integers; a token attends to those of the same id, such as its document.
            mask: boolean, true where a token may attend: `(sequence, sequence)`, the same for all examples, or
                `(batch, sequence, sequence)`, or with 1 in the place of heads behind the batch. A token that may attend
                to none gets zeros from the attention.
            deterministic: whether dropout is off; the module's `deterministic` by default.
            dropout_key: in place of the next one of the module's own.

        Raises:
            ValueError: if shapes do not fit.
        """
        if x.ndim != 3:
            raise ValueError(f"Attention takes (batch, sequence, features); got shape {x.shape}.")
        key = self.core.dropout_key(deterministic, dropout_key)
        given = {"positions": positions, "segment_ids": segment_ids, "mask": mask, "dropout_key": key}
        return super().__call__(x, deterministic=key is None, **given)

    def local(self, x: jax.Array, *, deterministic: bool, **inputs: Any) -> jax.Array:
        del deterministic  # said by the key
        if inputs["positions"] is None and inputs["segment_ids"] is not None and self.core.rope_theta is not None:
            inputs["positions"] = positions_of(inputs["segment_ids"])
        by_head = {name: _by_head(y, self.core.head_dim) for name, y in self.qkv(x).items()}
        mixed = self.core(by_head["query"], by_head["key"], by_head["value"], **inputs)
        return self.out(jnp.reshape(mixed, (*mixed.shape[:2], -1)))

    def partition_of_input(self, name: int | str, array: Any) -> PartitionSpec:
        return _partition(self, name, array)


class CrossAttention(Layer):
    """Attention to the output of another network, an encoder.

    Queries are made of the normalised input, keys and values of the memory as it is.

    Args:
        features: size of the input and of the output.
        memory_features: size of the memory; `features` by default.

    The other arguments are those of `Attention`.
    """

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
        norm: Norm = "rms",
        epsilon: float = 1e-6,
        sequence_parallel: bool = True,
        rngs: nnx.Rngs,
        **options: Unpack[DenseOptions],
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        head_dim = _head_dim(features, num_heads, num_kv_heads, head_dim, degree(self.roles.tensor))
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
            qk_norm=qk_norm,
            sinks=sinks,
            dropout_rate=dropout_rate,
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
            memory: `(batch, memory, memory_features)`; inside a `shard_map` sharded along its sequence like `x`.
            segment_ids: of `x` and of the memory, `(batch, sequence)` and `(batch, memory)`; a token attends to those
                of the same id.
            mask: boolean, true where a token may attend: `(batch, sequence, memory)`, or as in `Attention`.
            deterministic, dropout_key: as in `Attention`.

        Raises:
            ValueError: if shapes do not fit.
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
        del deterministic  # said by the key
        q = _by_head(self.query(x), self.core.head_dim)
        kv = self.kv(memory)
        k, v = (_by_head(kv[name], self.core.head_dim) for name in ("key", "value"))
        mixed = self.core(q, k, v, **inputs)
        return self.out(jnp.reshape(mixed, (*mixed.shape[:2], -1)))

    def partition_of_input(self, name: int | str, array: Any) -> PartitionSpec:
        if name == "memory":
            return between_layers(self.roles, self.sequence_parallel)
        return _partition(self, name, array)


def _by_head(x: jax.Array, head_dim: int) -> jax.Array:
    return jnp.reshape(x, (*x.shape[:-1], -1, head_dim))


def _partition(layer: Layer, name: int | str, array: Any) -> PartitionSpec:
    """Returns the partition of a mask, positions or segments: whole where all examples have the same."""
    alike = {"mask": array.ndim == 2 or array.shape[0] == 1, "positions": array.ndim == 1} if array.ndim else {}
    return PartitionSpec() if alike.get(str(name)) else Layer.partition_of_input(layer, name, array)


def _head_dim(features: int, num_heads: int, num_kv_heads: int, head_dim: int | None, tp: int) -> int:
    check_heads(num_heads, num_kv_heads, tp)
    if head_dim is None:
        if features % num_heads:
            raise ValueError(f"`num_heads` {num_heads} does not divide `features` {features}; pass `head_dim` as well.")
        head_dim = features // num_heads
    if head_dim < 1:
        raise ValueError(f"`head_dim` is {head_dim}; it must be at least 1.")
    return head_dim


def check_heads(num_heads: int, num_kv_heads: int, tp: int) -> None:
    """Refuses heads that cannot be divided among groups and tp ranks.

    Raises:
        ValueError: naming the two numbers and the remedy.
    """
    if min(num_heads, num_kv_heads) < 1:
        raise ValueError(
            f"`num_heads` is {num_heads} and `num_kv_heads` {num_kv_heads}; both are whole numbers of at least 1."
        )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"`num_kv_heads` {num_kv_heads} does not divide `num_heads` {num_heads}; every group has as many queries."
        )
    if num_kv_heads < tp:
        raise ValueError(
            f"tp {tp} is more than the {num_kv_heads} key-value heads ({num_heads} query heads), of which every rank "
            "needs one. Choose a tp degree of at most that, and shard weights further over gtp instead."
        )
