"""Blocks of elements along the last dimension of an array, and arrays that have one element for each block.

Blocks are those of the logical array, so they do not depend on the mesh.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import PartitionSpec

from ..mesh import axes_by_dim, degrees, spec_by_dim
from ._choice import BLOCK_ROWS
from ._padding import AnyLayout
from ._placement import Placement
from ._storage import UNPADDED, Padding

# Shards are whole multiples of this along either dimension, if sizes allow it, so a shard seldom cuts a block.
ROW_BLOCK = BLOCK_ROWS


def row_blocks_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of an array with one element per block of an array of this shape. The last block of a row may
    be shorter."""
    return (*shape[:-1], *(-(-size // ROW_BLOCK) for size in shape[-1:]))


def row_blocks_spec(shape: Sequence[int], spec: PartitionSpec) -> PartitionSpec:
    """Returns the partition of an array with one element per block: that of the array itself, except for those axes of
    the mesh in scope that cut blocks.

    Args:
        shape: the shape of the array as it is stored.
        spec: its partition.
    """
    axes = axes_by_dim(spec, len(shape))
    if shape:
        last = axes[-1]
        whole = [n for n in range(len(last) + 1) if shape[-1] % (ROW_BLOCK * degrees(last[:n])) == 0]
        axes[-1] = last[: max(whole, default=0)]
    return spec_by_dim(axes)


def row_blocks_layout(layout: AnyLayout) -> Placement:
    """Returns the shapes, logical and stored, of an array with one element per block of an array with this layout, as a
    placement that names no axes."""
    logical, stored = row_blocks_shape(layout.shape), row_blocks_shape(layout.array_shape)
    sizes = enumerate(zip(logical, stored, strict=True))
    (padding,) = [Padding(dim, wide - size) for dim, (size, wide) in sizes if wide != size] or [UNPADDED]
    return Placement(PartitionSpec(), PartitionSpec(), (), logical, padding)
