"""Chooses layouts on the mesh in scope: what is sharded, along which dimension, and over which axes."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Collection, Mapping, Sequence

from ..mesh import current_roles, degree, degrees
from ._even_shares import shares_are_even, shares_may_be_even
from ._layout import Layout, listed
from ._pad_choice import Target, choose_padding
from ._split import Split
from ._storage import UNDIVIDED, UNPADDED, Division, Padding

# Blocks, except those that shards may cut (`formats.Tiled`), have up to 16 rows on the wire and up to 32 elements along
# a contraction. If sizes allow it, a shard consists of whole blocks, so that each rank can quantize its own shard.
BLOCK_ROWS, BLOCK = 16, 32

# Shards of up to this many elements, counted over all kernels of a gather, may be replicated over the optimizer's axes
# without a warning.
SMALL = 1 << 16


def divided(dim: int | None, axes: Sequence[str]) -> Division:
    """Returns the division of a dimension over these axes of the mesh in scope; `UNDIVIDED` without axes."""
    return Division(dim, tuple(axes), tuple(map(degree, axes))) if axes else UNDIVIDED


def layouts_of_kernels(
    shapes: Sequence[tuple[int, ...]],
    *,
    rows: int,
    split_dim: int | None = None,
    units: Sequence[int] | None = None,
    axes: tuple[str, ...] | None = None,
    experts_axis: str | None = None,
) -> tuple[Layout, ...]:
    """Lays out kernels that have the same input, and are gathered together, on the mesh in scope.

    All kernels get the same axes, and are sharded along the same dimension: rows if every shard then has whole blocks;
    otherwise columns, under the same condition; otherwise whichever dimension the ranks divide. Shards are divided
    further in storage over the axes of the optimizer, by the same rule. They are replicated over those axes that divide
    neither dimension, with a warning unless they are small.

    If the tensor axis does not divide the units of a kernel evenly, storage is sharded over that axis too, and gathered
    over it. If the axes divide no dimension, the kernels are gathered over fewer axes, with as many ranks as possible.
    Under `even_shares`, and in the layouts that a `TrainState` uses (`Layout.even`), the stored arrays are padded
    instead (see `Storage`), and also so that the optimizer's axes divide shards: along a dimension that neither
    `experts_axis` nor, in storage, the tensor axis divides, to whole blocks if that adds little, otherwise until the
    ranks divide it. A warning is issued if kernels stay whole nevertheless.

    Args:
        shapes: the logical shapes, which may differ only in the number of rows.
        rows: the dimension of output features.
        split_dim: the dimension that the tensor axis divides, if any.
        units: the number of elements per unit of that dimension, for each kernel; 1 by default.
        axes: the axes to gather over; by default those of the roles in scope.
        experts_axis: the axis whose ranks divide the first dimension, if any; see `Storage`.

    Raises:
        ValueError: if `axes` is not a tuple of different axes, or contains an axis that already divides the weight; or
            if the ranks of `experts_axis` do not divide the number of experts.
    """
    roles = current_roles()
    axes = (roles.weights if experts_axis is None else roles.over_experts) if axes is None else axes
    if not isinstance(axes, tuple) or len(set(axes)) < len(axes):
        raise ValueError(f"`axes` is {axes!r}; it must be a tuple of different mesh axes, such as ('gtp',).")
    experts = degree(experts_axis)
    if experts_axis is not None:
        if experts_axis in axes:
            raise ValueError(
                f"`axes` {axes} of a weight of shape {shapes[0]} contains {experts_axis!r}, whose ranks have experts "
                "of their own and do not gather one another's. Leave it out."
            )
        if shapes[0][0] % experts:
            raise ValueError(
                f"{shapes[0][0]} experts cannot be divided among the {experts} ranks of {experts_axis}. Choose an ep "
                "that divides the number of experts."
            )
    splits: list[Split | None] = [None] * len(shapes)
    if split_dim is not None:
        if roles.tensor in axes:
            raise ValueError(
                f"`axes` {axes} of a weight of shape {shapes[0]} contains {roles.tensor!r}, which already divides its "
                f"dimension {split_dim}. Leave it out, or choose `parallel=None`."
            )
        units = [1] * len(shapes) if units is None else units
        splits = [
            Split.in_blocks(shape[split_dim] // (experts if split_dim == 0 else 1), unit, roles.tensor)
            for shape, unit in zip(shapes, units, strict=True)
        ]
    even = all(split is None or split.even for split in splits)
    tensor = () if split_dim is None or roles.tensor is None else (roles.tensor,)
    parts = degrees(tensor) if even else 1
    local = [
        tuple(size // ((parts if d == split_dim else 1) * (experts if d == 0 else 1)) for d, size in enumerate(shape))
        for shape in shapes
    ]
    cols = 2 * len(shapes[0]) - 3 - rows
    used = {
        "tensor": divided(split_dim, tensor if even else ()),
        "experts": divided(0, () if experts_axis is None else (experts_axis,)),
        "rows": rows,
        "split_dim": split_dim,
        "roles": roles,
    }

    def laid_out(*, pad: bool) -> tuple[Layout, ...]:
        for chosen in axes_choices(axes, None if even else roles.tensor):
            ranks = degrees(chosen)
            dim, paddings = _dim_divided(local, ranks, rows, cols), [UNPADDED] * len(shapes)
            if dim is None and pad and ranks == degrees(axes if even else (*tensor, *axes)):
                blocks = {d: size for d, size in ((rows, BLOCK_ROWS), (cols, BLOCK)) if d != split_dim or parts == 1}
                dim, paddings = _padded(shapes, ranks, blocks)
            if dim is not None:
                layouts = tuple(
                    Layout(shape, gather=divided(dim, chosen), padding=padding, split=split, **used)
                    for shape, padding, split in zip(shapes, paddings, splits, strict=True)
                )
                return _divided_further(layouts, pad=pad)
        raise AssertionError("a choice of no axes divides everything")

    layouts = laid_out(pad=shares_may_be_even())
    first = layouts[0]
    warn_of_whole(shapes[0], [axis for axis in axes if axis not in first.gather.axes])
    if sum(math.prod(layout.of_shards.shard_shape) for layout in layouts) > SMALL:
        warn_of_whole(shapes[0], [axis for axis in _further(first) if axis not in first.optimizer.axes])
    if shares_are_even() or not any(layout.padding.size for layout in layouts):
        return layouts
    return tuple(dataclasses.replace(one, even=even) for one, even in zip(laid_out(pad=False), layouts, strict=True))


def _dim_divided(shapes: Sequence[tuple[int, ...]], ranks: int, rows: int, cols: int) -> int | None:
    """Returns the dimension that the ranks divide in all these shapes, if any. Prefers a division into whole blocks."""
    for dim, multiple in ((rows, BLOCK_ROWS), (cols, BLOCK), (rows, 1), (cols, 1)):
        if ranks == 1 or all(shape[dim] % (ranks * multiple) == 0 for shape in shapes):
            return dim if ranks > 1 else rows
    return None


def _padded(
    shapes: Sequence[tuple[int, ...]], ranks: int, blocks: Mapping[int, int]
) -> tuple[int | None, list[Padding]]:
    """Returns the dimension to pad so that the ranks of a gather divide it, and the padding of each kernel.

    Pads to whole blocks along the first dimension where that adds little. Otherwise, pads to equal shards along the
    dimension where that adds less. Returns `None` for the dimension if shards would be no smaller than the weight.

    Args:
        shapes: the shapes of the kernels.
        ranks: the number of ranks.
        blocks: the dimensions that may be padded, with the sizes of blocks along them.
    """
    whole = [Target(dim, ranks * size) for dim, size in blocks.items()]
    equal = [Target(dim, ranks) for dim in blocks if all(shape[dim] > 1 for shape in shapes)]
    return choose_padding(shapes, whole, equal)


def _further(layout: Layout) -> tuple[str, ...]:
    """Returns the axes of the optimizer that may divide the shards of a weight."""
    taken = (*layout.axes, *layout.experts.axes)
    return tuple(axis for axis in layout.roles.over_optimizer if axis not in taken and degree(axis) > 1)


def _divided_further(layouts: tuple[Layout, ...], *, pad: bool) -> tuple[Layout, ...]:
    """Returns the layouts with their shards divided over the axes of the optimizer, with as many ranks as possible, or,
    with `pad`, over all of them."""
    first, axes = layouts[0], _further(layouts[0])
    shapes = [layout.shard_shape for layout in layouts]
    for chosen in axes_choices(axes):
        ranks = degrees(chosen)
        dim, paddings = _dim_divided(shapes, ranks, first.rows, first.cols), [layout.padding for layout in layouts]
        if dim is None and pad and chosen == axes:
            dim, paddings = _padded_further(layouts, ranks)
        if dim is not None:
            return tuple(
                dataclasses.replace(layout, optimizer=divided(dim, chosen), padding=padding)
                for layout, padding in zip(layouts, paddings, strict=True)
            )
    raise AssertionError("a choice of no axes divides everything")


def _padded_further(layouts: Sequence[Layout], copies: int) -> tuple[int | None, list[Padding]]:
    """Returns the dimension to pad so that the ranks of the optimizer's axes divide each shard along it, and the
    padding of each kernel.

    Prefers a dimension that the gather does not divide, if that adds little, because shards then stay as they are. Only
    one dimension is padded. Returns `None` for the dimension if parts would be no smaller than the shard.

    Args:
        layouts: the layouts, not yet divided over these axes.
        copies: the number of ranks.
    """
    first = layouts[0]
    blocks = {first.rows: BLOCK_ROWS, first.cols: BLOCK}
    of_gather, of_tensor = (one.dim if one.ranks > 1 else None for one in (first.gather, first.tensor))
    padded = {layout.padding.dim for layout in layouts if layout.padding.size}
    parts = {
        dim: copies * (first.ranks if dim == of_gather else 1) for dim in blocks if dim != of_tensor and padded <= {dim}
    }
    whole = {dim: Target(dim, count * blocks[dim]) for dim, count in parts.items()}
    equal = {
        dim: Target(dim, count) for dim, count in parts.items() if all(one.shard_shape[dim] > 1 for one in layouts)
    }
    preferred = [
        *(target for dim, target in whole.items() if dim != of_gather),
        *(target for dim, target in equal.items() if dim != of_gather),
        *(target for dim, target in whole.items() if dim == of_gather),
    ]
    return choose_padding([layout.shape for layout in layouts], preferred, list(equal.values()))


def axes_choices(
    axes: tuple[str, ...], tensor: str | None = None, *, preferred: Collection[str] | None = None
) -> list[tuple[str, ...]]:
    """Returns the combinations of axes that may divide a weight, those with the most ranks first, down to no axes. Of
    two with equally many ranks, the one with more of the preferred axes comes first.

    Args:
        axes: the axes to choose from.
        tensor: the tensor axis, if it divides a weight unevenly and may shard its storage as the other axes do.
        preferred: the preferred axes; by default all.
    """
    some = [chosen for count in range(len(axes) + 1) for chosen in itertools.combinations(axes, count)]
    if tensor is not None and tensor not in axes:
        some += [(tensor, *chosen) for chosen in some]
    liked = {*axes, tensor} if preferred is None else set(preferred)
    return sorted(some, key=lambda chosen: (-degrees(chosen), -len(liked.intersection(chosen))))


def warn_of_whole(shape: tuple[int, ...], axes: Sequence[str]) -> None:
    """Warns that a weight stays whole over those of the axes that have more than one rank.

    Args:
        shape: the shape of the weight.
        axes: the axes.
    """
    sizes = {axis: degree(axis) for axis in axes if degree(axis) > 1}
    if sizes:
        warnings.warn(
            f"a weight of shape {shape} stays whole on every rank of {listed(sizes)}, which cannot divide its "
            "dimensions further. If it is large, choose sizes that the degrees divide"
            + ("." if shares_may_be_even() else ", or leave out `gtp_jax.layout.even_shares(False)`."),
            stacklevel=4,
        )
