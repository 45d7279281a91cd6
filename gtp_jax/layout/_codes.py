"""Lays out weights that are stored as codes: in shards of whole blocks, padded where needed and possible."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..formats import Format, codes_shape, scales_shape
from ._layout import Layout
from ._pad_choice import Target, choose_padding
from ._placement import Placement
from ._storage import UNDIVIDED, UNPADDED, Padding


def layouts_of_codes(layout: Layout, form: Format) -> dict[str, Placement]:
    """Returns the placements of the arrays of codes, by their names in `QuantizedArray`, except those that are never
    padded: amaxes, and the scales of blocks that shards may cut.

    Args:
        layout: the layout of the weight, whose shards are whole blocks unless they may cut blocks.
        form: the format of the codes.
    """
    lead, logical, stored = layout.shape[:-2], layout.matrix_of(layout.shape), layout.matrix_of(layout.array_shape)
    used, degrees, found = layout.gathered.matrix_spec, tuple(layout.degrees.items()), {}
    for name, shape_of in (("codes", codes_shape), ("scales", scales_shape)):
        own, padded = shape_of(form, logical, False), shape_of(form, stored, False)
        whole = name == "scales" and form.cut_by_shards
        if own is not None and padded is not None and not whole:
            sizes = enumerate(zip(own, padded, strict=True), len(lead))
            (padding,) = [Padding(dim, wide - size) for dim, (size, wide) in sizes if wide != size] or [UNPADDED]
            found[name] = Placement(layout.matrix_spec, used, degrees, (*lead, *own), padding)
    return found


def layouts_in_blocks(layouts: Sequence[Layout], form: Format) -> tuple[Layout, ...]:
    """Returns layouts of the same kernels in which a gather divides rows or columns into whole blocks of a format, and
    the axes of the optimizer do not divide shards.

    It divides columns only if the rows that a rank has of each kernel are whole blocks. A dimension is padded only if
    the ranks divide neither; it is the one where that adds least, other than one that tensor ranks divide. If there is
    none, the layouts keep their shards. Blocks that tensor ranks cut along the other dimension stay cut.

    Args:
        layouts: the layouts of kernels that are gathered together, over more than one rank.
        form: the format of the codes.
    """
    shards = [layout.of_shards for layout in layouts]
    first, run = shards[0], dict(zip((shards[0].rows, shards[0].cols), form.run, strict=True))
    of_tensor = first.tensor.dim if first.tensor.ranks > 1 else None
    own = [_sizes_of_rank(layout) for layout in shards]
    # a block of a gathered matrix never contains rows of two kernels
    whole_rows = all(sizes[first.rows] % run[first.rows] == 0 for sizes in own)
    dims = (first.rows, first.cols) if whole_rows else (first.rows,)
    for dim in dims:
        if all(sizes[dim] % (first.ranks * run[dim]) == 0 for sizes in own):
            return _divided_along(shards, dim, [UNPADDED] * len(shards))
    targets = [Target(dim, first.ranks * run[dim]) for dim in dims if dim != of_tensor]
    dim, paddings = choose_padding([layout.shape for layout in shards], [], targets)
    return tuple(shards) if dim is None else _divided_along(shards, dim, paddings)


def _sizes_of_rank(layout: Layout) -> list[int]:
    """Returns the sizes of the part of a weight that the ranks of a gather divide among them."""
    ranks = {one.dim: one.ranks for one in (layout.tensor, layout.experts)}
    return [size // ranks.get(dim, 1) for dim, size in enumerate(layout.shape)]


def _divided_along(layouts: Sequence[Layout], dim: int, paddings: Sequence[Padding]) -> tuple[Layout, ...]:
    return tuple(
        dataclasses.replace(layout, gather=layout.gather._replace(dim=dim), optimizer=UNDIVIDED, padding=padding)
        for layout, padding in zip(layouts, paddings, strict=True)
    )
