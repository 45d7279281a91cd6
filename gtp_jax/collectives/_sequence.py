"""The activation's collectives on the tp axis, at once (Korthikanti et al. 2022, arXiv 2205.05198). Called inside a
`shard_map`. Around a plain matmul the sequence moves part by part instead, see `_ring`.

Gradients are those of the sum of every rank's loss with respect to every rank's copy (the convention of `shard_map`
with `check_vma=False`). So `psum` transposes to `psum`, nothing is added at the entrance of a column-parallel layer,
and a parameter that a mesh axis does not cut gets its gradient summed over that axis, once, at the end.
"""

from __future__ import annotations

import jax
from jax import lax

from ..mesh import TP, degree


def enter(x: jax.Array, *, sequence_parallel: bool) -> jax.Array:
    """`(batch, sequence / tp, features)` to `(batch, sequence, features)`, ahead of a column-parallel matmul."""
    if degree(TP) == 1 or not sequence_parallel:
        return x
    return lax.all_gather(x, TP, axis=1, tiled=True)


def leave(y: jax.Array, *, sequence_parallel: bool) -> jax.Array:
    """Sums the partial products behind a row-parallel matmul, and cuts the sequence again if it was cut."""
    if degree(TP) == 1:
        return y
    if not sequence_parallel:
        return lax.psum(y, TP)
    return lax.psum_scatter(y, TP, scatter_dimension=1, tiled=True)
