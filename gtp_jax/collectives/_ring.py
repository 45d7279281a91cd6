"""Overlaps matmuls with the communication of the sequence over tp, part by part (Wang et al., ASPLOS 2023).

Before a column-parallel matmul, the sequence is gathered; after a row-parallel matmul, it is summed and sharded again.
As single operations, the matmul and the collective wait for each other. Cut into the parts of the ranks, they overlap:
one part is multiplied while another is sent from neighbor to neighbor. Parts are counted backwards from this rank: part
0 is its own, and part s is that of the rank s positions before it. Operations on single tokens do not depend on this
order; attention does, see `join_parts`. Called inside a `shard_map`.

[Note: turns]
XLA's scheduler would send everything before the first matmul, or first multiply the part that arrives last. So each
matmul is tied, through an optimization barrier, to the part that is sent at the same time. The next step takes the
results of both, and sends the part on. Gradients use the same two loops, each of which is the transpose of the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float, Shaped

from ..mesh import degree
from ..ops import SlottedWeight, as_one, linear, to_input, to_weight, values_and_slot
from ._turns import at_once

Parts = tuple[jax.Array, ...]


def gather_linear(
    x: Float[jax.Array, "batch part *inner features_in"],
    weight: Float[jax.Array, "features_out features_in"] | SlottedWeight,
    axis: str,
) -> tuple[Float[jax.Array, "batch part *inner features_out"], ...]:
    """Returns `linear` of every rank's part of the sequence. `x` is this rank's part.

    Backward gathers the sequence again for the weight's gradient (Korthikanti et al. 2022, arXiv 2205.05198). With two
    parts, that gradient is summed in the dtype of the weight or of its slot; with more, in at least float32, because
    every addition rounds.

    Args:
        x: `(batch, sequence / tp, ..., features_in)`.
        weight: `(features_out, features_in)`.
        axis: the tensor axis, which shards the sequence.
    """
    values, slot = values_and_slot(weight)
    return _gather_linear(x, values, slot, axis, slot.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _gather_linear(x: jax.Array, weight: jax.Array, slot: jax.Array, axis: str, dtype: np.dtype) -> Parts:
    del slot, dtype
    return _gathered_product(axis, x, weight)


def _gathered_product(axis: str, x: jax.Array, weight: jax.Array) -> Parts:
    return while_gathered(x, lambda part, _: linear(part, weight), axis)


def _gather_linear_forward(x: jax.Array, weight: jax.Array, slot: jax.Array, axis: str, dtype: np.dtype):
    del slot, dtype
    return as_one(functools.partial(_gathered_product, axis), x, weight), (x, weight)


def _gather_linear_backward(axis: str, dtype: np.dtype, saved: tuple[jax.Array, jax.Array], gradients: Parts):
    x, weight = saved
    to_x = while_scattered(gradients, lambda gradient: to_input(gradient, weight), axis)
    terms = while_gathered(x, lambda part, s: _term(part, gradients[s], axis, dtype), axis)
    return to_x, None, sum_of_terms(terms, dtype)


_gather_linear.defvjp(_gather_linear_forward, _gather_linear_backward)


def linear_scatter(
    parts: tuple[Float[jax.Array, "batch part *inner features_in"], ...],
    weight: Float[jax.Array, "features_out features_in"] | SlottedWeight,
    axis: str,
) -> Float[jax.Array, "batch part *inner features_out"]:
    """Applies `linear` to every part of the sequence, sums over ranks, and returns this rank's part of the result.

    The sum is computed in the dtype of the product, as in a reduce-scatter; the weight's gradient as in
    `gather_linear`.

    Args:
        parts: the parts of the sequence, `(batch, sequence / tp, ..., features_in)` each.
        weight: `(features_out, features_in)`.
        axis: the tensor axis, which shards the sequence.
    """
    values, slot = values_and_slot(weight)
    return _linear_scatter(parts, values, slot, axis, slot.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _linear_scatter(parts: Parts, weight: jax.Array, slot: jax.Array, axis: str, dtype: np.dtype) -> jax.Array:
    del slot, dtype
    return _scattered_product(axis, parts, weight)


def _scattered_product(axis: str, parts: Parts, weight: jax.Array) -> jax.Array:
    return while_scattered(parts, lambda part: linear(part, weight), axis)


def _linear_scatter_forward(parts: Parts, weight: jax.Array, slot: jax.Array, axis: str, dtype: np.dtype):
    del slot, dtype
    return as_one(functools.partial(_scattered_product, axis), parts, weight), (parts, weight)


def _linear_scatter_backward(axis: str, dtype: np.dtype, saved: tuple[Parts, jax.Array], gradient: jax.Array):
    parts, weight = saved
    terms: list[jax.Array] = []

    def to_part(gradient: jax.Array, s: int) -> jax.Array:
        terms.append(_term(parts[s], gradient, axis, dtype))
        return to_input(gradient, weight)

    return while_gathered(gradient, to_part, axis), None, sum_of_terms(terms, dtype)


_linear_scatter.defvjp(_linear_scatter_forward, _linear_scatter_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def join_parts(
    parts: tuple[Shaped[jax.Array, "batch part *features"], ...], axis: str
) -> Shaped[jax.Array, "batch sequence *features"]:
    """Returns the whole sequence in its order, given its parts `(batch, sequence / ranks, ...)`."""
    return _join(parts, axis)


def _join(parts: Parts, axis: str) -> jax.Array:
    length = parts[0].shape[1]
    whole = jnp.zeros((parts[0].shape[0], length * len(parts), *parts[0].shape[2:]), parts[0].dtype)
    for part, start in zip(parts, _starts(length, axis), strict=True):
        whole = lax.dynamic_update_slice_in_dim(whole, part, start, 1)
    return whole


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def split_parts(
    x: Shaped[jax.Array, "batch sequence *features"], axis: str
) -> tuple[Shaped[jax.Array, "batch part *features"], ...]:
    """Returns the parts of a whole sequence, counted backwards from this rank; the inverse of `join_parts`.

    Raises:
        ValueError: if the axis does not divide the sequence.
    """
    return _split(x, axis)


def _split(x: jax.Array, axis: str) -> Parts:
    length, rest = divmod(x.shape[1], degree(axis))
    if rest:
        raise ValueError(
            f"an input of shape {x.shape} of a row-parallel layer is to be split along its sequence, dimension 1, over "
            f"{axis} = {degree(axis)}, which does not divide it. Pad the sequence, or pass `sequence_parallel=False`."
        )
    return tuple(lax.dynamic_slice_in_dim(x, start, length, 1) for start in _starts(length, axis))


# Each of the two is the inverse and the transpose of the other. JAX's own transposes, which second derivatives use, add
# up arrays that are zero outside of one part.
join_parts.defvjp(lambda parts, axis: (_join(parts, axis), None), lambda axis, _, gradient: (_split(gradient, axis),))
split_parts.defvjp(lambda x, axis: (_split(x, axis), None), lambda axis, _, gradients: (_join(gradients, axis),))


def while_gathered(x: Any, make: Callable[[Any, int], jax.Array], axis: str) -> Parts:
    """Returns `make(part, s)` for every part, where `x` is part 0: an array, or a pytree of them. Each is computed
    while the next part is being sent [Note: turns]."""
    made = [make(x, 0)]
    for s in range(1, degree(axis)):
        x, made[-1] = at_once(_send(x, 1, axis), made[-1])
        made.append(make(x, s))
    return tuple(made)


def while_scattered(parts: Sequence[Any], make: Callable[[Any], jax.Array], axis: str) -> jax.Array:
    """Applies `make` to every part, sums over ranks, and returns this rank's part of the sum. Each term but the first
    is computed while the sum for another part is being sent."""
    total = make(parts[-1])
    for part in reversed(parts[:-1]):
        part, total = at_once(part, total)  # otherwise XLA would multiply all parts at once, before anything is sent
        # this keeps the addition out of the matmul, which would otherwise wait for the sum to arrive
        total, made = at_once(_send(total, -1, axis), make(part))
        total = total + made
    return total


def _term(part: jax.Array, gradient: jax.Array, axis: str, dtype: np.dtype) -> jax.Array:
    """Returns the term of one part in the weight's gradient, which has dtype `dtype`."""
    return to_weight(gradient, part, term_dtype(axis, dtype))


def term_dtype(axis: str, dtype: np.dtype) -> np.dtype:
    """Returns the dtype of each part's term in a weight's gradient of dtype `dtype`: if there are more than two terms,
    at least float32."""
    return dtype if degree(axis) <= 2 else jnp.promote_types(dtype, jnp.float32)


def sum_of_terms(terms: Sequence[jax.Array], dtype: np.dtype) -> jax.Array:
    """Returns the weight's gradient."""
    return sum(terms[1:], terms[0]).astype(dtype)


def _starts(length: int, axis: str) -> list[jax.Array]:
    own, ranks = lax.axis_index(axis), degree(axis)
    return [(own - s) % ranks * length for s in range(ranks)]


def _send(x: Any, ahead: int, axis: str) -> Any:
    ranks = degree(axis)
    return lax.ppermute(x, axis, [(rank, (rank + ahead) % ranks) for rank in range(ranks)])
