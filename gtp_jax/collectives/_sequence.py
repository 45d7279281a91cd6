"""The collectives of activations on the tensor axis, for the whole sequence at once (Korthikanti et al. 2022, arXiv
2205.05198). Called inside a `shard_map`. Around a plain matmul, the sequence is sent part by part instead, see `_ring`.

Gradients are those of the sum of all ranks' losses with respect to each rank's copy (the convention of `shard_map` with
`check_vma=False`). Therefore `psum` transposes to `psum`, no collective is needed at the entrance of a column-parallel
layer, and the gradient of a parameter that a mesh axis does not shard is summed over that axis once, at the end.
"""

from __future__ import annotations

import jax
from jax import lax
from jaxtyping import Float

from ..mesh import degree
from ._over_gloo import all_gather, reduce_scatter


def gather_sequence(
    x: Float[jax.Array, "batch *part features"], axis: str | None, *, sequence_parallel: bool
) -> Float[jax.Array, "batch *sequence features"]:
    """Gathers `(batch, sequence / ranks, features)` to `(batch, sequence, features)`, before a column-parallel
    matmul."""
    if axis is None or degree(axis) == 1 or not sequence_parallel:
        return x
    return all_gather(x, axis, dim=1)


def reduce_scatter_sequence(
    y: Float[jax.Array, "batch *sequence features"], axis: str | None, *, sequence_parallel: bool
) -> Float[jax.Array, "batch *part features"]:
    """Sums the partial products after a row-parallel matmul, and shards the sequence again if it was sharded.

    Raises:
        ValueError: if the sequence is to be sharded, and the axis does not divide it.
    """
    if axis is None or degree(axis) == 1:
        return y
    if not sequence_parallel:
        return lax.psum(y, axis)
    if y.shape[1] % degree(axis):
        raise ValueError(
            f"an output of shape {y.shape} is to be sharded along its sequence, dimension 1, over {axis} = "
            f"{degree(axis)}, which does not divide it. Pad the sequence, or pass `sequence_parallel=False`."
        )
    return reduce_scatter(y, axis, dim=1)
