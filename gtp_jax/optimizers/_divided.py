"""Matrices of one shape, each divided by the same mesh axes: their parts, and the matrices joined from them."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from ..mesh import degree, degrees


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
