"""The loss of a language model on logits that may be sharded."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ..mesh import current_roles, current_view, degree
from ..ops import token_cross_entropy


def cross_entropy(
    logits: jax.Array, targets: jax.Array, weights: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of token losses and the number of tokens, whose quotient is the mean loss.

    Inside a `shard_map` both count this rank's sequences; in global view, the whole batch.

    Args:
        logits: `(batch, sequence, vocab)`, the vocabulary sharded over tp as a column-parallel head leaves it. Inside a
            `shard_map` with tp above 1 whole logits, of a head with `parallel=None`, must not be passed.
        targets: `(batch, sequence)`, integers below vocab. Negative ones are left out, like those of weight 0.
        weights: `(batch, sequence)`: 0 leaves a token out of loss and count, 1 counts it. All count by default.

    Raises:
        ValueError: if shapes do not agree.
        TypeError: if targets are not integers.
    """
    if targets.shape != logits.shape[:-1] or (weights is not None and weights.shape != targets.shape):
        given = None if weights is None else weights.shape
        raise ValueError(
            f"logits {logits.shape}, targets {targets.shape}, weights {given}: targets and weights have the shape of "
            "the logits without the last dimension. With sequence parallelism a head gives the whole sequence."
        )
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise TypeError(f"`targets` are token ids, integers; got {targets.dtype}.")
    if weights is None:
        weights = jnp.ones(targets.shape, jnp.float32)
    weights = jnp.where(targets < 0, 0, weights)
    if current_view() != "global":
        return _sums(logits, targets, weights)
    roles = current_roles()
    batch = PartitionSpec(roles.batch)
    # a global array is sharded over an axis that divides it, and else whole
    sharded = logits.shape[-1] % degree(roles.tensor) == 0

    def local(logits, targets, weights):
        return lax.psum(_sums(logits, targets, weights, sharded=sharded), roles.batch)

    into = (PartitionSpec(roles.batch, None, roles.tensor if sharded else None), batch, batch)
    mapped = jax.shard_map(local, in_specs=into, out_specs=(PartitionSpec(), PartitionSpec()), check_vma=False)
    return mapped(logits, targets, weights)


def _sums(
    logits: jax.Array, targets: jax.Array, weights: jax.Array, *, sharded: bool = True
) -> tuple[jax.Array, jax.Array]:
    tensor = current_roles().tensor
    losses: jax.Array = token_cross_entropy(logits, targets, tensor if sharded and degree(tensor) > 1 else None)
    weights = weights.astype(losses.dtype)
    return jnp.sum(losses * weights), jnp.sum(weights)
