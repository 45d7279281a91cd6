"""Compares the parts of a weight with the blocks of a format."""

from __future__ import annotations

from collections.abc import Sequence

from ..formats import Format
from ..layout import Layout

# The layouts of each fused weight's kernels.
Fused = Sequence[Sequence[Layout]]


def fills_blocks(layout: Layout, form: Format) -> bool:
    """Returns whether the rows of a gathered matrix are at least as long as a block of a format."""
    return layout.matrix_of(layout.whole_shape)[1] >= form.run[1]


def tensor_cuts(layout: Layout, form: Format) -> bool:
    """Returns whether tensor ranks, each of which gathers its own part of the matrix, would cut blocks. Ranks that take
    their parts of a matrix that they gather whole cut none."""
    return _cut(layout.matrix_of(layout.shape), layout.matrix_of(layout.whole_shape), form)


def shards_fit(fused: Fused, form: Format) -> bool:
    """Returns whether each rank can quantize its own shards, because they cut no block; see [Note: whole]."""
    block_rows, block_cols = form.run

    def fits(layout: Layout) -> bool:
        rows, cols = layout.matrix_of(layout.shard_shape)
        return rows % block_rows == 0 and (layout.by_rows or cols % block_cols == 0)

    return fused[0][0].ranks == 1 or all(fits(layout) for layouts in fused for layout in layouts)


def stored_fit(fused: Fused, form: Format) -> bool:
    """Returns whether the parts of shards that ranks store consist of whole blocks of a format; see [Note: stored]."""
    block_rows, block_cols = form.run
    # a byte holds two codes of 4 bits
    block_cols = max(block_cols, 8 // form.element_bits)
    sizes = [layout.matrix_of(layout.stored_shape) for layouts in fused for layout in layouts]
    return all(rows % block_rows == 0 and cols % block_cols == 0 for rows, cols in sizes)


def cuts_blocks(layout: Layout, form: Format) -> bool:
    """Returns whether shards would cut blocks of a format, so that a rank cannot store the codes of its own shard."""
    whole, shard = layout.matrix_of(layout.shape), layout.matrix_of(layout.shard_shape)
    return _cut(whole, shard, form) or not shards_fit([[layout]], form)


def _cut(whole: tuple[int, int], part: tuple[int, int], form: Format) -> bool:
    """Returns whether parts of a matrix would cut blocks of a format; `whole` and `part` are sizes `(rows, cols)`."""
    return any(own != size and own % run for size, own, run in zip(whole, part, form.run, strict=True))
