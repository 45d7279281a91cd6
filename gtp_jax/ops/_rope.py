"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), in the half-split form that Llama uses."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rope(x: jax.Array, *, theta: float) -> jax.Array:
    """Rotates each head by its position in the sequence.

    Args:
        x: `(batch, sequence, heads, head_dim)`, `head_dim` even; the whole sequence, from position 0.
        theta: base of the geometric series of wavelengths.
    """
    half = x.shape[-1] // 2
    wide = jnp.promote_types(x.dtype, jnp.float32)
    frequency = theta ** (-jnp.arange(half, dtype=wide) / half)
    angle = jnp.arange(x.shape[1], dtype=wide)[:, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    # Halves change places by a flip, which XLA computes with what follows: a concatenation is a kernel of its own.
    halves = jnp.reshape(x, (*x.shape[:-1], 2, half)).astype(wide)
    rotated = halves * cos[:, None, None] + jnp.flip(halves, -2) * jnp.stack([-sin, sin], axis=1)[:, None]
    return jnp.reshape(rotated, x.shape).astype(x.dtype)
