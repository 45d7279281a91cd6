"""Cross-entropy on logits whose vocabulary is sharded over a mesh axis (Megatron-LM, arXiv 1909.08053, section 3)."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def token_cross_entropy(logits: jax.Array, targets: jax.Array, axis: str | None) -> jax.Array:
    """Returns `-log softmax(logits)[target]` of every token.

    Only the logits, in their own dtype, and one log-sum-exp a token are kept for backward. On GPUs the wide copy of
    the logits lives inside fused reductions and is never an array; XLA's CPU compiler makes one.

    Args:
        logits: `(..., vocab_slice)`: this rank's slice of the vocabulary.
        targets: `(...)`, integer ids in the whole vocabulary.
        axis: the manual mesh axis that shards the vocabulary, or `None` if it is whole.

    Returns:
        `(...)` in at least float32; equal on every rank of `axis`.
    """
    return _forward(logits, targets, axis)[0]


def _forward(logits: jax.Array, targets: jax.Array, axis: str | None):
    wide = jnp.promote_types(logits.dtype, jnp.float32)
    top = jnp.max(logits, axis=-1).astype(wide)
    if axis is not None:
        top = lax.pmax(top, axis)
    total = jnp.sum(jnp.exp(logits.astype(wide) - top[..., None]), axis=-1)
    here = _is_target(logits, targets, axis)
    picked = jnp.sum(jnp.where(here, logits.astype(wide), 0), axis=-1)
    if axis is not None:
        total, picked = lax.psum((total, picked), axis)
    log_sum_exp = jnp.log(total) + top
    return log_sum_exp - picked, (logits, targets, log_sum_exp)


def _backward(axis: str | None, residuals, cotangent: jax.Array):
    logits, targets, log_sum_exp = residuals
    if axis is not None:
        # every rank's loss depends on every rank's logits
        cotangent = lax.psum(cotangent, axis)
    probability = jnp.exp(logits.astype(log_sum_exp.dtype) - log_sum_exp[..., None])
    slope = (probability - _is_target(logits, targets, axis)) * cotangent[..., None]
    return slope.astype(logits.dtype), np.zeros(targets.shape, jax.dtypes.float0)


def _is_target(logits: jax.Array, targets: jax.Array, axis: str | None) -> jax.Array:
    size = logits.shape[-1]
    start = 0 if axis is None else lax.axis_index(axis) * size
    return lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) + start == targets[..., None]


token_cross_entropy.defvjp(_forward, _backward)
