"""Joins shards from the parts that ranks store, and reduces their gradients to those parts (ZeRO). Called inside a
`shard_map`.

The optimizer's axes divide a shard in storage; see `gtp_jax.layout.Layout`. If a dimension is padded for these axes
alone, joining removes the padding, and reducing pads the gradients with zeros. Arrays may have the leading dimension of
a stack of layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ..collectives import all_gather, moved_in_bits, reduce_scatter
from ..layout import Layout
from ..mesh import stacked_spec
from ..ops import row_major


def stored_specs(layouts: Sequence[Layout], arrays: Sequence[jax.Array]) -> tuple[PartitionSpec, ...]:
    """Returns the partitions of stored kernels, with or without the leading dimension of a stack."""
    return tuple(stacked_spec(layout.spec, x.ndim) for layout, x in zip(layouts, arrays, strict=True))


def gather_stored(
    stored: Sequence[jax.Array], layouts: Sequence[Layout], dtype: jax.typing.DTypeLike | None = None
) -> tuple[jax.Array, ...]:
    """Returns shards, joined from the parts that the ranks of the optimizer's axes store.

    Arrays that are already shards are only cast.

    Args:
        stored: one array per kernel, of its layout's `stored_shape` or `shard_shape`.
        layouts: the kernels' layouts.
        dtype: the dtype on the wire and of the result; by default, that of the arrays.
    """
    cast = [x if dtype is None else x.astype(dtype) for x in stored]
    return tuple(_gather(x, layout) if is_divided(x, layout) else x for x, layout in zip(cast, layouts, strict=True))


def scatter_stored(
    gradients: Sequence[jax.Array],
    layouts: Sequence[Layout],
    dtype: jax.typing.DTypeLike,
    out: Sequence[jax.typing.DTypeLike],
) -> tuple[jax.Array, ...]:
    """Sums gradients of shards over the optimizer's axes and returns this rank's stored part of each: the transpose of
    `gather_stored`.

    Args:
        gradients: one array per kernel, of its layout's `shard_shape`.
        layouts: the kernels' layouts.
        dtype: the dtype on the wire and of the sums.
        out: the dtype of each returned array.
    """
    return tuple(
        _scatter(x.astype(dtype), layout).astype(kind) if layout.copies > 1 else x.astype(kind)
        for x, layout, kind in zip(gradients, layouts, out, strict=True)
    )


def is_divided(array: jax.Array, layout: Layout) -> bool:
    """Returns whether an array is the part of a shard that one rank stores, instead of the whole shard."""
    return layout.copies > 1 and array.shape[array.ndim - len(layout.shape) :] == layout.stored_shape


def _gather(x: jax.Array, layout: Layout) -> jax.Array:
    assert layout.optimizer.dim is not None
    dim = x.ndim - len(layout.shape) + layout.optimizer.dim
    # along a new leading dimension, whichever is divided, so that XLA combines all gathers of a step in one launch
    parts = moved_in_bits(lambda x: all_gather(x[None], layout.optimizer.axes, dim=0), x)
    joined = jnp.reshape(jnp.moveaxis(parts, 0, dim), (*x.shape[:dim], -1, *x.shape[dim + 1 :]))
    size = layout.shard_shape[layout.optimizer.dim]
    return joined if joined.shape[dim] == size else lax.slice_in_dim(joined, 0, size, axis=dim)


def _scatter(x: jax.Array, layout: Layout) -> jax.Array:
    assert layout.optimizer.dim is not None
    dim = x.ndim - len(layout.shape) + layout.optimizer.dim
    more = layout.copies * layout.stored_shape[layout.optimizer.dim] - x.shape[dim]
    x = jnp.pad(x, [(0, more if d == dim else 0) for d in range(x.ndim)]) if more else x
    parts = jnp.reshape(x, (*x.shape[:dim], layout.copies, x.shape[dim] // layout.copies, *x.shape[dim + 1 :]))
    own = reduce_scatter(jnp.moveaxis(parts, dim, 0), layout.optimizer.axes, dim=0)
    return row_major(own[0])
