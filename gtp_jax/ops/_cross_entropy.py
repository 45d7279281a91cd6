"""Cross-entropy on logits whose vocabulary is sharded over a mesh axis (Megatron-LM, arXiv 1909.08053, section 3)."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._ids import to_index


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def token_cross_entropy(logits: jax.Array, targets: jax.Array, axis: str | None, vocab_size: int) -> jax.Array:
    """Returns `-log softmax(logits)[target]` of every token; 0 where the target is negative, for any logits.

    For a target of `vocab_size` or more, the loss is NaN, and has no gradient. The function itself can be
    differentiated in reverse mode only; its gradient can be differentiated by `jax.jvp` or `jax.grad`.

    The logits, in their own dtype, the targets and one log-sum-exp per token are saved for backward. On GPUs, the wide
    copy of the logits exists only inside fused reductions, never as an array; XLA's CPU compiler does make an array.

    Args:
        logits: `(..., vocab_slice)`: this rank's slice of the vocabulary.
        targets: `(...)`, integer ids in the whole vocabulary.
        axis: the manual mesh axis that shards the vocabulary, or `None` if it is whole.
        vocab_size: the size of the whole vocabulary. Slices may be padded beyond it, with logits of -inf.

    Returns:
        `(...)` in at least float32; equal on every rank of `axis`.
    """
    return _forward(logits, targets, axis, vocab_size)[0]


def _forward(logits: jax.Array, targets: jax.Array, axis: str | None, vocab_size: int):
    targets = to_index(targets)
    wide = _wide(logits, targets)
    # The maximum is a constant shift: its derivatives cancel, and `pmax` is not differentiable.
    top = lax.stop_gradient(jnp.max(wide, axis=-1))
    if axis is not None:
        top = lax.pmax(top, axis)
    total = jnp.sum(jnp.exp(wide - top[..., None]), axis=-1)
    here = _is_target(wide, targets, axis)
    picked = jnp.sum(jnp.where(here, wide, 0), axis=-1)
    if axis is not None:
        total, picked = lax.psum((total, picked), axis)
    log_sum_exp = jnp.log(total) + top
    losses = jnp.where(targets < 0, 0, log_sum_exp - picked)
    return jnp.where(targets < vocab_size, losses, jnp.nan), (logits, targets, log_sum_exp)


def _backward(axis: str | None, vocab_size: int, residuals, cotangent: jax.Array):
    logits, targets, log_sum_exp = residuals
    if axis is not None:
        # every rank's loss depends on every rank's logits
        cotangent = lax.psum(cotangent, axis)
    probability = jnp.exp(_wide(logits, targets) - log_sum_exp[..., None])
    slope = (probability - _is_target(logits, targets, axis)) * cotangent[..., None]
    counts = (targets >= 0) & (targets < vocab_size)
    slope = jnp.where(counts[..., None], slope, 0).astype(logits.dtype)
    return slope, np.zeros(targets.shape, jax.dtypes.float0)


def _wide(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the logits in at least float32; zeros for a token without a target, whose logits need not be finite."""
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return jnp.where(targets[..., None] < 0, 0, wide)


def _is_target(logits: jax.Array, targets: jax.Array, axis: str | None) -> jax.Array:
    size = logits.shape[-1]
    start = 0 if axis is None else lax.axis_index(axis) * size
    return lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) + start == targets[..., None]


token_cross_entropy.defvjp(_forward, _backward)
