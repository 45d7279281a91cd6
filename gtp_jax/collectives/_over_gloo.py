"""An all-gather and its transpose, a reduce-scatter, that are also correct between CPU processes.

Under `jax.distributed`, XLA's CPU backend computes collectives with gloo. Its reduce-scatter sends from a buffer that
it overwrites: sometimes the end of the first rank's result is wrong, without an error (jax-ml/jax#40830). It also gives
up if a process is 30 s late (jax-ml/jax#40831). Between CPU processes, a reduce-scatter is therefore an all-to-all and
a local sum, in order of rank. An all-gather is an all-to-all too, because JAX would transpose it to a reduce-scatter.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Shaped

from ..mesh import degrees, platform

Axes = str | tuple[str, ...]


def all_gather(x: Shaped[jax.Array, "*shape"], axes: Axes, *, dim: int) -> Shaped[jax.Array, "*result"]:
    """Gathers the parts of all ranks of `axes`, joined along a dimension. Its transpose is `reduce_scatter`."""
    if not _over_gloo():
        return lax.all_gather(x, axes, axis=dim, tiled=True)
    copies = jnp.broadcast_to(x, (_ranks(axes), *x.shape))
    parts = jnp.moveaxis(lax.all_to_all(copies, axes, 0, 0), 0, dim)
    return jnp.reshape(parts, (*x.shape[:dim], -1, *x.shape[dim + 1 :]))


def reduce_scatter(x: Shaped[jax.Array, "*shape"], axes: Axes, *, dim: int) -> Shaped[jax.Array, "*result"]:
    """Sums the arrays of all ranks of `axes`, and returns this rank's part along a dimension that the ranks divide."""
    if not _over_gloo():
        return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    parts = jnp.moveaxis(jnp.reshape(x, (*x.shape[:dim], _ranks(axes), -1, *x.shape[dim + 1 :])), dim, 0)
    return jnp.sum(lax.all_to_all(parts, axes, 0, 0), axis=0)


def _over_gloo() -> bool:
    return platform() == "cpu" and jax.distributed.is_initialized()


def _ranks(axes: Axes) -> int:
    return degrees((axes,) if isinstance(axes, str) else axes)
