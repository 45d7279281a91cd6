"""Grouped matmuls in plain XLA, tile by tile: for CPUs, and for dtypes that the GPU kernels do not support."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._contract import GroupedMatmul
from ._tiles import Tiles, cut_into_tiles


def _product(
    x: jax.Array, weight: jax.Array, group_sizes: jax.Array, *, dtype: np.dtype, transposed: bool
) -> jax.Array:
    weight = _by_group(weight)
    if not x.shape[0]:
        return jnp.zeros((0, weight.shape[1 if transposed else 2]), dtype)
    tiles, rows, valid = _tiles(group_sizes, x.shape[0])
    groups = weight.shape[0]
    contracted = (((1,), (1 if transposed else 0,)), ((), ()))

    def multiply(tile: tuple[jax.Array, jax.Array]) -> jax.Array:
        group, part = tile
        kernel = lax.dynamic_index_in_dim(weight, jnp.minimum(group, groups - 1), keepdims=False)
        y = lax.dot_general(part, kernel, contracted, preferred_element_type=_wide(x.dtype)).astype(dtype)
        return jnp.where(group < groups, y, 0)

    parts = lax.map(multiply, (tiles.group, x[jnp.minimum(rows, x.shape[0] - 1)]))
    flat = jnp.where(valid, rows, x.shape[0])  # out-of-bounds rows are dropped
    return jnp.zeros((x.shape[0], parts.shape[-1]), dtype).at[flat].set(parts, mode="drop")


def _outer(y: jax.Array, x: jax.Array, group_sizes: jax.Array, *, dtype: np.dtype, shards: int) -> jax.Array:
    groups, wide = group_sizes.shape[0], _wide(x.dtype)
    zeros = jnp.zeros((groups, y.shape[1], x.shape[1]), wide)
    if not x.shape[0]:
        return _by_shard(zeros.astype(dtype), shards)
    tiles, rows, valid = _tiles(group_sizes, x.shape[0])

    def add(total: jax.Array, tile: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        group, rows, valid = tile
        rows = jnp.minimum(rows, x.shape[0] - 1)
        left, right = (jnp.where(valid[:, None], a[rows], 0) for a in (y, x))
        part = lax.dot_general(left, right, (((0,), (0,)), ((), ())), preferred_element_type=wide)
        return total.at[group].add(part, mode="drop"), None  # out of bounds: rows of no group

    return _by_shard(lax.scan(add, zeros, (tiles.group, rows, valid))[0].astype(dtype), shards)


XLA = GroupedMatmul(native=False, codes=None, lacks=lambda problem: "", product=_product, outer=_outer)


def _by_group(weight: jax.Array) -> jax.Array:
    """Maps `(shards, groups, part, in)` to `(groups, shards * part, in)`."""
    shards, groups, part, features = weight.shape
    return jnp.reshape(jnp.swapaxes(weight, 0, 1), (groups, shards * part, features))


def _by_shard(kernels: jax.Array, shards: int) -> jax.Array:
    """Maps `(groups, shards * part, in)` to `(shards, groups, part, in)`."""
    groups, rows, features = kernels.shape
    return jnp.swapaxes(jnp.reshape(kernels, (groups, shards, rows // shards, features)), 0, 1)


def _tiles(group_sizes: jax.Array, rows: int) -> tuple[Tiles, jax.Array, jax.Array]:
    """Returns the tiles, the rows of each tile `(tiles, size)`, and which of these rows are within the tile."""
    mean = rows // group_sizes.shape[0]
    size = min(128, max(8, 1 << mean.bit_length()))  # so that most groups fit in one tile
    tiles = cut_into_tiles(group_sizes, rows, size)
    index = tiles.start[:, None] + jnp.arange(size, dtype=jnp.int32)
    return tiles, index, index < tiles.stop[:, None]


def _wide(dtype: jax.typing.DTypeLike) -> jax.typing.DTypeLike:
    return jnp.promote_types(dtype, jnp.float32)
