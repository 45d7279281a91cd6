"""A gather and its transpose, a reduce-scatter, that are right between processes on CPUs too.

Under `jax.distributed` XLA's CPU backend computes collectives by gloo, whose reduce-scatter sends from a buffer that
it overwrites: at times the end of the first rank's result is wrong, without an error (jax-ml/jax#40830). It also gives
up when a process comes 30 s late (jax-ml/jax#40831). Both are written as an all-to-all there, which also adds in order
of rank. JAX transposes an all-gather to a reduce-scatter, so a gather through which JAX differentiates is written so,
too.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Shaped

from ..mesh import degrees, platform

Axes = str | tuple[str, ...]


def all_gather(x: Shaped[jax.Array, "*shape"], axes: Axes, *, dim: int) -> Shaped[jax.Array, "*result"]:
    """Returns the parts of all ranks of `axes`, joined along a dimension. Its transpose is `reduce_scatter`."""
    if not _over_gloo():
        return lax.all_gather(x, axes, axis=dim, tiled=True)
    copies = jnp.broadcast_to(x, (_ranks(axes), *x.shape))
    parts = jnp.moveaxis(lax.all_to_all(copies, axes, 0, 0), 0, dim)
    return jnp.reshape(parts, (*x.shape[:dim], -1, *x.shape[dim + 1 :]))


def reduce_scatter(x: Shaped[jax.Array, "*shape"], axes: Axes, *, dim: int) -> Shaped[jax.Array, "*result"]:
    """Sums what the ranks of `axes` have, and returns this rank's part along a dimension, which the ranks divide."""
    if not _over_gloo():
        return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    parts = jnp.moveaxis(jnp.reshape(x, (*x.shape[:dim], _ranks(axes), -1, *x.shape[dim + 1 :])), dim, 0)
    return jnp.sum(lax.all_to_all(parts, axes, 0, 0), axis=0)


def _over_gloo() -> bool:
    return platform() == "cpu" and jax.distributed.is_initialized()


def _ranks(axes: Axes) -> int:
    return degrees((axes,) if isinstance(axes, str) else axes)
