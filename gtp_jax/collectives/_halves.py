"""Divides causal attention to earlier parts of a sequence evenly among ranks. Called inside a `shard_map`.

Rank r of n has part r of every sequence, which is halves 2r and 2r + 1 of 2n. Queries of half c attend to all of the
earlier parts 0, ..., c // 2 - 1, and to their own part up to themselves. For the earlier parts, rank r works on halves
r and 2n - 1 - r. These have r // 2 and n - 1 - r // 2 earlier parts: together n - 1, on every rank.

Separate functions send halves and read what arrived, because XLA overlaps a launch with compute only if that compute,
and nothing else, is tied to the launch's results.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Shaped

from ..mesh import degree
from ._over_gloo import all_gather, reduce_scatter

Sent = tuple[jax.Array, jax.Array]  # halves that arrive from other ranks


def send_to_workers(x: Shaped[jax.Array, "*dims"], axis: str, dim: int) -> Sent:
    """Sends the halves of this rank's part of a sequence to the ranks that work on them; see `at_worker`.

    Args:
        x: an array with this rank's part along a dimension, of even size.
        axis: the mesh axis that divides the sequence.
        dim: the dimension.
    """
    first, second = jnp.split(x, 2, axis=dim)
    return _sent(first, axis, 0), _sent(second, axis, 1)


def at_worker(sent: Sent, axis: str) -> Shaped[jax.Array, "*halves"]:
    """Returns the two halves that this rank works on, stacked, the earlier one first."""
    return _reversed_on_odd_ranks(at_home(sent, axis), axis)


def send_home(halves: Shaped[jax.Array, "*halves"], axis: str) -> Sent:
    """Sends back what `at_worker` returned, or results in its place; see `at_home`."""
    first, second = _reversed_on_odd_ranks((halves[0], halves[1]), axis)
    return _sent(first, axis, 0, back=True), _sent(second, axis, 1, back=True)


def send_terms_home(
    halves: Shaped[jax.Array, "*halves"], axis: str, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Sends terms of sums back, in a dtype, and returns those that this rank has received. Between two ranks, terms are
    not rounded, and travel in a reduction that XLA can combine with others."""
    if degree(axis) > 2:
        return at_home(send_home(halves.astype(dtype), axis), axis)
    first, second = _reversed_on_odd_ranks((halves[0], halves[1]), axis)
    to_first = lax.axis_index(axis) == 1
    none = jnp.zeros_like(second)
    to_each = jnp.stack([jnp.where(to_first, second, none), jnp.where(to_first, none, second)])
    return first, reduce_scatter(to_each, axis, dim=0)[0]


def at_home(sent: Sent, axis: str) -> tuple[jax.Array, jax.Array]:
    """Returns the two halves that this rank has received, in their order."""
    first, second = sent
    return first, second[1 - lax.axis_index(axis)] if degree(axis) == 2 else second


def work(axis: str, n: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the n-th piece of a rank's work, for n from 0 to ranks - 2: which of its two halves attends, and to which
    part."""
    of_earlier = lax.axis_index(axis) // 2
    later = n >= of_earlier
    return later.astype(jnp.int32), jnp.where(later, n - of_earlier, n)


def _reversed_on_odd_ranks(halves: tuple[jax.Array, jax.Array], axis: str) -> jax.Array:
    """Stacks two halves, the second one first on odd ranks: there, the half with the odd number is the earlier one."""
    odd = lax.axis_index(axis) % 2 == 1
    return jnp.where(odd, jnp.stack(halves[::-1]), jnp.stack(halves))


def _sent(x: jax.Array, axis: str, second: int, back: bool = False) -> jax.Array:
    """Sends each rank's first or second half to the rank that works on it, or back."""
    ranks = degree(axis)
    if ranks == 2:  # each works on its own first half; XLA combines a gather of the second with that of keys and values
        return all_gather(x[None], axis, dim=0) if second else x
    pairs = [(half // 2, min(half, 2 * ranks - 1 - half)) for half in range(second, 2 * ranks, 2)]
    return lax.ppermute(x, axis, [(worker, owner) for owner, worker in pairs] if back else pairs)
