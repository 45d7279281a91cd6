"""Plans where the codes of a layer's weights lie in the buffer that is sent.

[Note: whole]
If shards would cut a format's blocks (shards of 7 rows with blocks of 16, for example), the masters are gathered once
per step, layer by layer, and every rank quantizes the whole weights. Each rank keeps an equal part of the bytes, which
is what it sends in every pass. The blocks therefore do not depend on the number of ranks in the gather.
"""

from __future__ import annotations

import functools
import itertools

from ..formats import SECTION_BYTES, Format, PackPlan, Piece
from ..layout import Layout
from ._blocks import Fused, fills_blocks, shards_fit


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
            if not fills_blocks(layout, form):
                length = layout.matrix_of(layout.whole_shape)[1]
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
