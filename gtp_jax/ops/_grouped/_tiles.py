"""Cuts rows that are sorted by group into tiles that belong to one group each."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Tiles(NamedTuple):
    """A fixed number of tiles for any sizes of groups. Unused tiles come last and have no rows.

    Attributes:
        group: int32 `(tiles,)`, the group of each tile, non-decreasing. It equals the number of groups in tiles of rows
            that belong to no group, and in unused tiles.
        start: int32 `(tiles,)`, the first row of each tile.
        stop: int32 `(tiles,)`, the row after the last row of each tile; at most `start` in a tile without rows.
    """

    group: jax.Array
    start: jax.Array
    stop: jax.Array


def cut_into_tiles(group_sizes: jax.Array, rows: int, size: int) -> Tiles:
    """Returns tiles of at most `size` rows. Every row is in one tile, including rows after the last group.

    Args:
        group_sizes: int32 `(groups,)`, the number of rows of each group, in order. Groups are cut off at `rows`.
        rows: the number of rows.
        size: the maximum number of rows of a tile.
    """
    groups = group_sizes.shape[0]
    ends = jnp.minimum(jnp.cumsum(group_sizes, dtype=jnp.int32), rows)
    ends = jnp.append(ends, jnp.int32(rows))  # an additional group, for rows that belong to no group
    starts = jnp.append(jnp.int32(0), ends[:-1])
    counts = -(-(ends - starts) // size)
    behind = jnp.cumsum(counts, dtype=jnp.int32)
    index = jnp.arange(rows // size + groups + 1, dtype=jnp.int32)  # as many as the sum of the counts may be
    group = jnp.minimum(jnp.searchsorted(behind, index, side="right").astype(jnp.int32), groups)
    start = starts[group] + (index - (behind - counts)[group]) * size
    return Tiles(group, start, jnp.minimum(start + size, ends[group]))


def in_whole_blocks(x: jax.Array, group_sizes: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Moves rows apart, so that every group begins at a multiple of `block` and is padded with zeros.

    Args:
        x: `(rows, features)`, sorted by group.
        group_sizes: int32 `(groups,)`.
        block: the number of rows of a block.

    Returns:
        `(rows // block + groups + 1) * block` rows, with zeros after the last group; and the new sizes of the groups.
    """
    rows, groups = x.shape[0], group_sizes.shape[0]
    tiles = cut_into_tiles(group_sizes, rows, block)
    source = tiles.start[:, None] + jnp.arange(block, dtype=jnp.int32)
    real = (source < tiles.stop[:, None]) & (tiles.group < groups)[:, None]
    source, real = jnp.reshape(source, -1), jnp.reshape(real, (-1, 1))
    if rows == 0:  # JAX refuses to index an array without rows
        return jnp.zeros((source.size, *x.shape[1:]), x.dtype), jnp.zeros_like(group_sizes)
    moved = jnp.where(real, x[jnp.minimum(source, rows - 1)], 0)
    return moved, jnp.bincount(tiles.group, length=groups).astype(jnp.int32) * block
