"""Normalizations over the last dimension, computed in at least float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float

from ._save import row_major_in_training, save_for_backward


def rms_norm(
    x: Float[jax.Array | np.ndarray, "*rows features"],
    scale: Float[jax.Array | np.ndarray, " features"],
    *,
    epsilon: float = 1e-6,
    zero_centered: bool = False,
) -> Float[jax.Array, "*rows features"]:
    """Returns `x / sqrt(mean(x**2) + epsilon) * scale` (Zhang and Sennrich 2019, arXiv 1910.07467).

    Args:
        x: `(..., features)`.
        scale: `(features,)`.
        epsilon: the number added to the mean square.
        zero_centered: whether to multiply by `1 + scale` instead, as in Gemma.

    Returns:
        An array of the same shape and dtype as `x`.
    """
    wide = _wide(x)
    normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    factor = scale.astype(wide.dtype)
    return (normed * (1 + factor if zero_centered else factor)).astype(x.dtype)


def layer_norm(
    x: Float[jax.Array | np.ndarray, "*rows features"],
    scale: Float[jax.Array | np.ndarray, " features"],
    bias: Float[jax.Array | np.ndarray, " features"],
    *,
    epsilon: float = 1e-6,
) -> Float[jax.Array, "*rows features"]:
    """Returns `(x - mean) / sqrt(var + epsilon) * scale + bias` (Ba et al. 2016, arXiv 1607.06450)."""
    wide = _wide(x)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normed = centred * lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + epsilon)
    return (normed * scale.astype(wide.dtype) + bias.astype(wide.dtype)).astype(x.dtype)


def _wide(x: jax.Array | np.ndarray) -> jax.Array:
    # Backward needs the input. It is usually the residual stream, which would otherwise be recomputed from all its
    # terms.
    return save_for_backward(row_major_in_training(jnp.asarray(x))).astype(jnp.promote_types(x.dtype, jnp.float32))
