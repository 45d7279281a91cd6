"""Computes which part of an array each device of a mesh stores."""

from __future__ import annotations

import math
from collections.abc import Mapping

from jax.sharding import PartitionSpec

from ..mesh import axes_by_dim

# A part of an array: the start and the stop along each dimension.
Box = tuple[tuple[int, int], ...]


def box_of(shape: tuple[int, ...], spec: PartitionSpec, sizes: Mapping[str, int], place: Mapping[str, int]) -> Box:
    """Returns the part of an array that a device stores, the same as with a `NamedSharding`.

    Args:
        shape: the shape of the array.
        spec: the array's partition; its axes must divide the array evenly.
        sizes: the sizes of the mesh axes.
        place: the coordinates of the device in the mesh, by axis.
    """
    box = []
    for size, axes in zip(shape, axes_by_dim(spec, len(shape)), strict=True):
        index, parts = 0, 1
        for axis in axes:
            index, parts = index * sizes[axis] + place[axis], parts * sizes[axis]
        width, rest = divmod(size, parts)
        assert not rest, f"{parts} parts of a dimension of {size}"
        box.append((index * width, (index + 1) * width))
    return tuple(box)


def intersect(one: Box, other: Box) -> Box | None:
    """Returns the intersection of two parts; `None` if it is empty."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def whole_of(shape: tuple[int, ...]) -> Box:
    """Returns the part that is all of an array of this shape."""
    return tuple((0, size) for size in shape)


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Returns the slices that select a part of an array from a larger part."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, outer, strict=True))


def shape_of(box: Box) -> tuple[int, ...]:
    """Returns the shape of a part."""
    return tuple(stop - start for start, stop in box)


def elements(box: Box) -> int:
    """Returns the number of elements of a part."""
    return math.prod(shape_of(box))
