"""Plans where the codes of a layer's weights lie in the buffer that is sent.

[Note: whole]
If shards would cut a format's blocks (shards of 7 rows with blocks of 16, for example), the masters are gathered once
per step, layer by layer, and every rank quantizes the whole weights. Each rank keeps an equal part of the bytes, which
is what it sends in every pass. The blocks therefore do not depend on the number of ranks in the gather.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from ..formats import SECTION_BYTES, Format, PackPlan, Piece
from ..layout import Layout

# The layouts of each fused weight's kernels.
Fused = Sequence[Sequence[Layout]]


def plan_of(fused: Fused, form: Format, *, stored: bool = False) -> PackPlan:
    """Returns the positions of a layer's kernels in their buffer, which holds shards, or whole kernels if shards would
    cut blocks.

    Args:
        fused: the layouts of each fused weight's kernels.
        form: the format of the codes.
        stored: whether the buffer instead holds the parts of shards that ranks store.

    Raises:
        ValueError: if a kernel's rows are shorter than a block.
    """
    return _plan(tuple(map(tuple, fused)), form, stored)


@functools.cache
def _plan(fused: tuple[tuple[Layout, ...], ...], form: Format, stored: bool) -> PackPlan:
    """Implements `plan_of`, for hashable arguments."""
    by_shard = shards_fit(fused, form)
    pieces = []
    arrays = 0
    for out, layouts in enumerate(fused):
        row = 0
        for matrix, (number, layout) in itertools.product(range(layouts[0].matrices), enumerate(layouts)):
            here = layout.stored_shape if stored else layout.shard_shape
            rows, cols = layout.matrix_of(here if by_shard else layout.whole_shape)
            length = layout.matrix_of(layout.whole_shape)[1]
            if length < form.run[1]:
                raise ValueError(
                    f"a weight of shape {layout.shape} has rows of {length} elements per rank, fewer than the "
                    f"{form.run[1]} of a block of {form.name}. Name its module in the recipe's `exclude`, or use "
                    "`gtp_jax.FP8()`, which has no blocks."
                )
            transposed = by_shard and layout.rows > layout.cols
            pieces.append(
                Piece(
                    rows=rows,
                    cols=cols,
                    transposed=transposed,
                    total_rows=rows,
                    out=out,
                    out_row=row,
                    source=(arrays + number, matrix),
                )
            )
            row += rows
        arrays += len(layouts)
    return PackPlan(tuple(pieces), by_shard=True)


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
    return cut(whole, shard, form) or not shards_fit([[layout]], form)


def cut(whole: tuple[int, int], part: tuple[int, int], form: Format) -> bool:
    """Returns whether parts of a matrix would cut blocks of a format; `whole` and `part` are sizes `(rows, cols)`."""
    return any(own != size and own % run for size, own, run in zip(whole, part, form.run, strict=True))


def bytes_sent(fused: Fused, form: Format) -> int:
    """Returns the number of bytes that each rank sends in a gather."""
    size = plan_of(fused, form).bytes(form)
    if shards_fit(fused, form):
        return size
    return -(-size // (fused[0][0].ranks * SECTION_BYTES)) * SECTION_BYTES


def wire_bytes(fused: Fused, form: Format) -> int:
    """Returns the number of bytes of a layer's gathered weights on the wire: the codes and scales of all shards."""
    first = fused[0][0]
    return first.shards * bytes_sent(fused, form)
