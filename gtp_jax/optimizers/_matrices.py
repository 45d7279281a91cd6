"""The matrices that an array holds, and how the mesh divides them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..mesh import axes_by_dim, degree, degrees
from ._divided import Divided


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

    def whole(self, function: Callable[[jax.Array], jax.Array], array: jax.Array) -> jax.Array:
        """Returns the result of a function of matrices, `(count, rows, columns)`, for an array that no axis divides."""
        if not array.size:
            return array
        parts = self.flat(array)
        rows = math.prod(self.shape[dim] for dim in self.rows)
        return self.unflat(function(parts.reshape(len(parts), rows, -1)))

    def unflat(self, parts: jax.Array) -> jax.Array:
        """Returns a rank's part of the array; the inverse of `flat`."""
        ordered = parts.reshape([self.local[dim] for dim in self.order])
        return ordered.transpose(sorted(range(len(self.order)), key=self.order.__getitem__))
