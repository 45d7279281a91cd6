"""The attention half of a transformer block."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..mesh import degree
from ..ops import causal_attention, rope, save_for_backward
from ._dense import Dense, LayerNormDense, Norm
from ._layer import Layer


class Attention(Layer):
    """Causal self-attention with rotary embedding and grouped queries (Ainslie et al. 2023, arXiv 2305.13245).

    Args:
        features: size of the input and of the output.
        heads: query heads, divided among tp ranks with the key-value head that they share.
        kv_heads: key and value heads; divides `heads`, and is at least tp. All heads by default.
        head_dim: `features // heads` by default.
        rope_theta: base of the rotary wavelengths; `None` for no rotary embedding.
        norm: of the input, as in `LayerNormDense`.
        sequence_parallel: as in `Dense`.
        rngs: the `params` stream is used.
        options: passed to both `Dense` layers.

    Raises:
        ValueError: if there are fewer key-value heads than tp ranks, or `kv_heads` does not divide `heads`.
    """

    def __init__(
        self,
        features: int,
        *,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        rope_theta: float | None = 10_000.0,
        norm: Norm = "rms",
        eps: float = 1e-6,
        sequence_parallel: bool = True,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        check_heads(heads, kv_heads, degree(self.roles.tensor))
        if head_dim is None:
            if features % heads:
                raise ValueError(f"`heads` {heads} does not divide `features` {features}; pass `head_dim` as well.")
            head_dim = features // heads
        if head_dim < 1 or (head_dim % 2 and rope_theta is not None):
            raise ValueError(f"`head_dim` is {head_dim}; rotary embedding needs an even number of at least 2.")
        shared: dict[str, Any] = {"sequence_parallel": sequence_parallel, "rngs": rngs, **options}
        sizes = {"query": heads * head_dim, "key": kv_heads * head_dim, "value": kv_heads * head_dim}
        group = heads // kv_heads * head_dim  # the features of the queries that share a key-value head
        units = {"query": group, "key": head_dim, "value": head_dim}
        # padding is whole heads of zeros, which attend to nothing but zeros
        self.qkv = LayerNormDense(features, sizes, norm=norm, eps=eps, units=units, padding_value=0.0, **shared)
        self.out = Dense(heads * head_dim, features, parallel="row", units=group, **shared)
        self.head_dim = head_dim
        self.rope_theta = rope_theta
        self.sequence_parallel = sequence_parallel

    def local(self, x: jax.Array) -> jax.Array:
        """Maps `(batch, sequence, features)` to the same shape."""
        if x.ndim != 3:
            raise ValueError(f"Attention takes (batch, sequence, features); got shape {x.shape}.")
        by_head = {name: jnp.reshape(y, (*y.shape[:-1], -1, self.head_dim)) for name, y in self.qkv(x).items()}
        q, k, v = by_head["query"], by_head["key"], by_head["value"]
        if self.rope_theta is not None:
            q, k = rope(q, theta=self.rope_theta), rope(k, theta=self.rope_theta)
        mixed = causal_attention(save_for_backward(q), save_for_backward(k), save_for_backward(v))
        return self.out(jnp.reshape(mixed, (*mixed.shape[:2], -1)))


def check_heads(heads: int, kv_heads: int, tp: int) -> None:
    """Refuses heads that cannot be divided among groups and tp ranks.

    Raises:
        ValueError: naming the two numbers and the remedy.
    """
    if min(heads, kv_heads) < 1:
        raise ValueError(f"`heads` is {heads} and `kv_heads` {kv_heads}; both are whole numbers of at least 1.")
    if heads % kv_heads:
        raise ValueError(f"`kv_heads` {kv_heads} does not divide `heads` {heads}; every group has as many queries.")
    if kv_heads < tp:
        raise ValueError(
            f"tp {tp} is more than the {kv_heads} key-value heads ({heads} query heads), of which every rank needs "
            "one. Choose a tp degree of at most that, and shard weights further over gtp instead."
        )
