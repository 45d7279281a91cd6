"""Matrices of one shape, each divided by the same mesh axes: their parts, and the matrices joined from them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..mesh import axes_by_dim, degree, degrees


@dataclasses.dataclass(frozen=True)
class Divided:
    """Matrices of one shape and dtype, each divided by the same mesh axes.

    A rank has a *part* of each matrix. Parts have the same shape: the last ones may be filled up with zeros.

    Attributes:
        shape: the dimensions of a matrix before they are joined to rows and columns.
        rows: how many of these are joined to the rows; the others are joined to the columns.
        axes: for each dimension, the mesh axes that divide it, outermost first.
        divides: the mesh axes that divide a matrix, in the order of the mesh.
        copies: the mesh axes whose ranks have the same parts.
        dtype: the name of the dtype.
    """

    shape: tuple[int, ...]
    rows: int
    axes: tuple[tuple[str, ...], ...]
    divides: tuple[str, ...]
    copies: tuple[str, ...]
    dtype: str

    @property
    def owners(self) -> tuple[str, ...]:
        """The mesh axes whose ranks share the matrices as owners of whole ones."""
        return self.divides + self.copies

    @property
    def part(self) -> tuple[int, ...]:
        """The shape of a part."""
        return tuple(-(-size // degrees(axes)) for size, axes in zip(self.shape, self.axes, strict=True))

    @property
    def size(self) -> int:
        """The number of elements of a part."""
        return math.prod(self.part)

    @property
    def matrix(self) -> tuple[int, int]:
        """The rows and columns of a matrix."""
        return math.prod(self.shape[: self.rows]), math.prod(self.shape[self.rows :])

    def joined(self, parts: jax.Array) -> jax.Array:
        """Returns matrices, `(matrices, rows, columns)`, of which each rank sent a part: `(ranks, matrices, size)`,
        with ranks in the order of `divides`."""
        count = parts.shape[1]
        parts = parts.reshape(*map(degree, self.divides), count, *self.part)
        full = [size * degrees(axes) for size, axes in zip(self.part, self.axes, strict=True)]
        found = parts.transpose(self._order()).reshape(count, *full)
        return found[:, *map(slice, self.shape)].reshape(count, *self.matrix)

    def parts(self, matrices: jax.Array) -> jax.Array:
        """Returns the parts of matrices; the inverse of `joined`."""
        count = matrices.shape[0]
        full = [size * degrees(axes) for size, axes in zip(self.part, self.axes, strict=True)]
        more = [(0, to - size) for to, size in zip(full, self.shape, strict=True)]
        found = jnp.pad(matrices.reshape(count, *self.shape), [(0, 0), *more])
        split = [n for axes, size in zip(self.axes, self.part, strict=True) for n in (*map(degree, axes), size)]
        order = self._order()
        found = found.reshape(count, *split).transpose(sorted(range(len(order)), key=order.__getitem__))
        return found.reshape(degrees(self.divides), count, self.size)

    def _order(self) -> list[int]:
        """Returns the dimensions of `(*divides, matrices, *part)` with each axis before the dimension it divides."""
        before = len(self.divides)
        dims = [i for dim, own in enumerate(self.axes, before + 1) for i in (*map(self.divides.index, own), dim)]
        return [before, *dims]


@dataclasses.dataclass(frozen=True)
class Matrices:
    """An array whose last dimensions are, in some order, those of matrices.

    Attributes:
        shape: the shape of the array.
        spec: its partition; axes that do not divide a dimension evenly leave smaller parts at its end.
        rows: the dimensions that are joined to the rows of a matrix.
        columns: the dimensions that are joined to its columns. All other dimensions count matrices.
    """

    shape: tuple[int, ...]
    spec: PartitionSpec
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """The dimensions that count matrices."""
        return tuple(dim for dim in range(len(self.shape)) if dim not in self.rows + self.columns)

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions that count matrices, those of rows, and those of columns."""
        return self.counts + self.rows + self.columns

    @property
    def axes(self) -> list[tuple[str, ...]]:
        """The mesh axes of more than one rank that divide each dimension."""
        return [tuple(axis for axis in own if degree(axis) > 1) for own in axes_by_dim(self.spec, len(self.shape))]

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape with each dimension rounded up to what its axes divide evenly."""
        return tuple(-(-size // n) * n for size, n in zip(self.shape, map(degrees, self.axes), strict=True))

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of a rank's part of the array."""
        return tuple(-(-size // n) for size, n in zip(self.shape, map(degrees, self.axes), strict=True))

    @property
    def count(self) -> int:
        """The number of matrices of which a rank has a part."""
        return math.prod(self.local[dim] for dim in self.counts)

    def behind(self, count: int) -> Matrices:
        """Returns a description of several such arrays, stacked along a new first dimension."""
        later = [tuple(dim + 1 for dim in dims) for dims in (self.rows, self.columns)]
        return Matrices((count, *self.shape), PartitionSpec(None, *self.spec), *later)

    def divided(self, names: Sequence[str], dtype: jax.typing.DTypeLike) -> Divided:
        """Returns how each matrix is divided by the axes of a mesh with these names."""
        dims, axes = self.rows + self.columns, self.axes
        of_dims = tuple(axes[dim] for dim in dims)
        divides = tuple(axis for axis in names if any(axis in own for own in of_dims))
        copies = tuple(axis for axis in names if degree(axis) > 1 and not any(axis in own for own in axes))
        shape = tuple(self.shape[dim] for dim in dims)
        return Divided(shape, len(self.rows), of_dims, divides, copies, jnp.dtype(dtype).name)

    def flat(self, local: jax.Array) -> jax.Array:
        """Returns the parts of matrices in a rank's part of the array, `(count, size)`."""
        return local.transpose(self.order).reshape(self.count, -1)

    def unflat(self, parts: jax.Array) -> jax.Array:
        """Returns a rank's part of the array; the inverse of `flat`."""
        ordered = parts.reshape([self.local[dim] for dim in self.order])
        return ordered.transpose(sorted(range(len(self.order)), key=self.order.__getitem__))
