"""Divides causal attention to earlier parts of a sequence evenly among ranks. Called inside a `shard_map`.

Rank r of n has part r of every sequence, which is halves 2r and 2r + 1 of 2n. Queries of half c attend to all of parts
0, ..., c // 2 - 1, and to their own part up to themselves. For the former, rank r works on halves r and 2n - 1 - r,
which have r // 2 and n - 1 - r // 2 such parts: together n - 1, on every rank.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Shaped

from ..mesh import degree
from ._over_gloo import all_gather


def to_workers(x: Shaped[jax.Array, "*dims"], axis: str, dim: int) -> Shaped[jax.Array, "*halves"]:
    """Returns the two halves that this rank works on, stacked, the earlier one first, given its part of the sequence.

    Args:
        x: an array with this rank's part along a dimension, of even size.
        axis: the mesh axis that divides the sequence.
        dim: the dimension.
    """
    return _reversed_on_odd_ranks([_sent(x, axis, n) for n, x in enumerate(jnp.split(x, 2, axis=dim))], axis)


def from_workers(halves: Shaped[jax.Array, "*halves"], axis: str, dim: int) -> Shaped[jax.Array, "*dims"]:
    """Returns this rank's part of the sequence, given the halves that it worked on; the inverse of `to_workers`."""
    by_number = _reversed_on_odd_ranks(list(halves), axis)
    return jnp.concatenate([_sent(x, axis, n, back=True) for n, x in enumerate(by_number)], axis=dim)


def work(axis: str, n: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the n-th product of a rank's work, for n from 0 to ranks - 2: which of its two halves attends to which
    part."""
    of_earlier = lax.axis_index(axis) // 2
    later = n >= of_earlier
    return later.astype(jnp.int32), jnp.where(later, n - of_earlier, n)


def _reversed_on_odd_ranks(halves: list[jax.Array], axis: str) -> jax.Array:
    """Stacks two halves. Of those that a rank works on, one has an even number, the earlier one on even ranks."""
    odd = lax.axis_index(axis) % 2 == 1
    return jnp.where(odd, jnp.stack(halves[::-1]), jnp.stack(halves))


def _sent(x: jax.Array, axis: str, second: int, back: bool = False) -> jax.Array:
    """Sends each rank's first or second half to the rank that works on it, or back."""
    ranks = degree(axis)
    if ranks == 2:  # each works on its own first half; XLA combines a gather of the second with that of keys and values
        return all_gather(x[None], axis, dim=0)[1 - lax.axis_index(axis)] if second else x
    pairs = [(half // 2, min(half, 2 * ranks - 1 - half)) for half in range(second, 2 * ranks, 2)]
    return lax.ppermute(x, axis, [(worker, owner) for owner, worker in pairs] if back else pairs)
