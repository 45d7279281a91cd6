"""Computes the cross-entropy loss of logits that may be sharded."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ..mesh import axes_in_order, current_roles, current_view, degree, spec_of_tokens
from ..ops import check_concrete_ids, to_index, token_cross_entropy


def cross_entropy(
    logits: jax.Array, targets: jax.Array, weights: jax.Array | None = None, *, vocab_size: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted sum of the token losses and the sum of the weights, which by default is the number of
    tokens that are not left out. Their quotient is the mean loss.

    Inside a `shard_map`, the sums are over this rank's tokens; otherwise, over the whole batch. In global view, if
    the batch cannot be divided evenly among the ranks, every rank computes the sums of the whole batch. A token that is
    left out affects neither the sums nor any gradient, even if its logits are not finite. Only reverse-mode
    differentiation is supported. The gradient can be differentiated again by `jax.jvp` or `jax.grad`.

    Args:
        logits: `(batch, ..., vocab)`, with any number of dimensions: `(batch, sequence, vocab)` for a language model,
            `(batch, vocab)` for a classifier. Inside a `shard_map`, they are this rank's part of the vocabulary, as
            returned by a column-parallel head, or the whole vocabulary, as returned by a head with `parallel=None`.
        targets: `(batch, ...)` integers. Any negative target, such as -1 or -100, leaves its token out. A target that
            is not below the vocabulary size raises an error if its value is concrete (not traced). In a traced program
            it makes the loss NaN; `gtp_jax.ops.check_ids(targets, vocab, name="targets", ignore_negative=True)` then
            names it.
        weights: `(batch, ...)`, the weight of each token in both sums: 0 leaves the token out. 1 by default.
        vocab_size: the size of the whole vocabulary; by default, the last dimension of the logits. Required inside a
            `shard_map` if the tp degree is above 1, where it shows whether the logits are sharded.

    Raises:
        ValueError: if shapes are not consistent with each other; if a concrete target is not below the vocabulary size;
            or if `vocab_size` is required but missing, or does not fit the logits.
        TypeError: if targets are not integers.
    """
    if (
        not logits.ndim
        or targets.shape != logits.shape[:-1]
        or (weights is not None and weights.shape != targets.shape)
    ):
        given = None if weights is None else weights.shape
        raise ValueError(
            f"logits {logits.shape}, targets {targets.shape}, weights {given}: targets and weights must have the "
            "shape of the logits without the last dimension. With sequence parallelism, a head returns the logits "
            "of the whole sequence."
        )
    sharded, vocab_size = vocabulary(logits.shape[-1], vocab_size, "cross_entropy")
    targets, weights = counted(targets, weights, vocab_size)
    if current_view() != "global":
        return _sums(logits, targets, weights, sharded, vocab_size)
    roles = current_roles()
    by_token = spec_of_tokens(roles, targets.shape)
    tokens = (*by_token, *(None,) * (targets.ndim - len(by_token)))

    def local(logits, targets, weights):
        sums = _sums(logits, targets, weights, sharded, vocab_size)
        return lax.psum(sums, axes_in_order(by_token)) if len(by_token) else sums

    into = (PartitionSpec(*tokens, roles.tensor if sharded else None), by_token, by_token)
    mapped = jax.shard_map(local, in_specs=into, out_specs=(PartitionSpec(), PartitionSpec()), check_vma=False)
    return mapped(logits, targets, weights)


def counted(targets: jax.Array, weights: jax.Array | None, vocab_size: int) -> tuple[jax.Array, jax.Array]:
    """Returns targets that are negative exactly where a token is left out, and weights that are 0 there.

    Raises:
        TypeError: if targets are not integers.
        ValueError: if a concrete target is not below the vocabulary size.
    """
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise TypeError(f"`targets` are {targets.dtype}; they must be token ids, which are integers.")
    if weights is None:
        weights = jnp.ones(targets.shape, jnp.float32)
    targets = jnp.where(weights == 0, -1, to_index(jnp.asarray(targets)))
    weights = jnp.where(targets < 0, 0, weights)
    check_concrete_ids(targets, vocab_size, name="targets", ignore_negative=True)
    return targets, weights


def vocabulary(width: int, vocab_size: int | None, caller: str) -> tuple[bool, int]:
    """Returns whether the vocabulary of logits is sharded over tp, and its size.

    Args:
        width: the last dimension of the logits.
        vocab_size: the size of the vocabulary, if it is known.
        caller: the name of the calling function in error messages.

    Raises:
        ValueError: if the size does not fit the logits, or is required but missing.
    """
    axis = current_roles().tensor
    tp = degree(axis)
    if current_view() != "local" or tp == 1:
        if vocab_size not in (None, width):
            raise ValueError(
                f"`vocab_size` is {vocab_size}, but the last dimension of the logits, here the whole vocabulary, is "
                f"{width}. Pass logits of {vocab_size} tokens, or remove `vocab_size`."
            )
        # the vocabulary of a global array is sharded over tp if tp divides it; otherwise it is whole
        return tp > 1 and width % tp == 0, width
    if vocab_size is None:
        raise ValueError(
            f"the last dimension of the logits of `{caller}` is {width} inside a `shard_map` over {axis} = {tp}, "
            "so it may be either the whole vocabulary or this rank's part of it. Pass the size of the whole vocabulary "
            "as `vocab_size=`."
        )
    part = -(-vocab_size // tp)
    if width not in (vocab_size, part):
        raise ValueError(
            f"`vocab_size` is {vocab_size}, but the last dimension of the logits is {width}, which is neither the "
            f"whole vocabulary nor one of its {tp} parts of size {part}."
        )
    return width != vocab_size, vocab_size


def _sums(
    logits: jax.Array, targets: jax.Array, weights: jax.Array, sharded: bool, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
    axis = current_roles().tensor if sharded else None
    losses: jax.Array = token_cross_entropy(jnp.asarray(logits), targets, axis, vocab_size)
    weights = weights.astype(losses.dtype)
    return jnp.sum(losses * weights), jnp.sum(weights)
