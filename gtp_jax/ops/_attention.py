"""Causal attention: cuDNN where it runs, written out elsewhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..mesh import platform
from ._implementation import Implementation, runs_native


def causal_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, implementation: Implementation | None = None
) -> jax.Array:
    """Computes softmax attention under a causal mask; there may be fewer key-value heads than query heads.

    Args:
        q: `(batch, sequence, heads, head_dim)`.
        k: `(batch, sequence, kv_heads, head_dim)`; `kv_heads` divides `heads`.
        v: like `k`.
        implementation: `"reference"`, written out; `"native"`, cuDNN's, for bfloat16 and float16 on GPUs; or `None`
            for the best at hand.

    Returns:
        `(batch, sequence, heads, head_dim)`.

    Raises:
        NotImplementedError: if `implementation` is `"native"`, and cuDNN does not take these.
    """
    fits = platform() == "gpu" and q.dtype in (jnp.bfloat16, jnp.float16)
    missing = "" if fits else f"cuDNN takes bfloat16 and float16 on GPUs, and this is {q.dtype}"
    if runs_native("causal_attention", implementation, missing):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    return _written_out(q, k, v)


def _written_out(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    # jax.nn's own XLA path takes the softmax in float32 whatever the inputs; here float64 stays float64.
    batch, length, heads, head_dim = q.shape
    groups = jnp.reshape(q, (batch, length, k.shape[2], heads // k.shape[2], head_dim))
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", groups, k, preferred_element_type=wide) * head_dim**-0.5
    causal = jnp.tril(jnp.ones((length, length), bool))
    probs = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(wide).min), axis=-1).astype(v.dtype)
    return jnp.reshape(jnp.einsum("bkgqs,bskd->bqkgd", probs, v), q.shape)
