"""Causal attention: cuDNN where it runs, written out elsewhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, *, platform: str) -> jax.Array:
    """Softmax attention under a causal mask, with fewer key-value heads than query heads if wanted.

    Args:
        q: `(batch, sequence, heads, head_dim)`.
        k: `(batch, sequence, kv_heads, head_dim)`; `kv_heads` divides `heads`.
        v: like `k`.
        platform: what the program is compiled for. cuDNN takes bf16 and fp16 on `gpu`.

    Returns:
        `(batch, sequence, heads, head_dim)`.
    """
    if platform == "gpu" and q.dtype in (jnp.bfloat16, jnp.float16):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    return _written_out(q, k, v)


def _written_out(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    # jax.nn's own XLA path takes the softmax in float32 whatever the inputs; here float64 stays float64.
    batch, length, heads, head_dim = q.shape
    groups = jnp.reshape(q, (batch, length, k.shape[2], heads // k.shape[2], head_dim))
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", groups, k, preferred_element_type=wide) * head_dim**-0.5
    causal = jnp.tril(jnp.ones((length, length), bool))
    chance = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(wide).min), axis=-1).astype(v.dtype)
    return jnp.reshape(jnp.einsum("bkgqs,bskd->bqkgd", chance, v), q.shape)
