"""The division of a dimension among the ranks of the tensor axis."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..mesh import degree


@dataclasses.dataclass(frozen=True)
class Split:
    """A dimension as a sequence of units, of which each rank of a mesh axis owns a contiguous run.

    A unit is what must stay together: a column of an MLP's hidden features, a group of heads, a row of a vocabulary, or
    an expert. Runs may differ in length, and may be empty. All ranks run the same program, so every rank's part of an
    array has the width of the longest run, and shorter runs are padded.

    Methods that move data must be called inside a `shard_map`.

    Attributes:
        size: the number of elements of the dimension, a multiple of `unit`.
        unit: the number of elements per unit.
        owners: the number of units that each rank owns, in order of rank.
        axis: the mesh axis of these ranks; `None` if there is none.

    Raises:
        ValueError: if a run is negative, or the runs do not add up to the dimension.
    """

    size: int
    unit: int
    owners: tuple[int, ...]
    axis: str | None

    def __post_init__(self) -> None:
        if sum(self.owners) * self.unit != self.size or min(self.owners) < 0:
            raise ValueError(
                f"`owners` is {self.owners}, in units of {self.unit}, but the dimension has {self.size} elements; the "
                "units of all ranks must add up to the dimension, and none may be negative."
            )

    @classmethod
    def in_blocks(cls, size: int, unit: int, axis: str | None) -> Split:
        """Returns the split that gives every rank `ceil(units / ranks)` units until none are left."""
        units, ranks = size // unit, degree(axis)
        block = -(-units // ranks)
        owners = tuple(max(0, min(block, units - rank * block)) for rank in range(ranks))
        return cls(size, unit, owners, axis)

    @property
    def even(self) -> bool:
        """Whether all ranks own the same number of units, so that nothing is padded."""
        return len(set(self.owners)) == 1

    @property
    def width(self) -> int:
        """The number of elements of each rank's part, padding included."""
        return max(self.owners) * self.unit

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of elements that each rank owns."""
        return tuple(units * self.unit for units in self.owners)

    @property
    def starts(self) -> tuple[int, ...]:
        """The index of the first element that each rank owns."""
        return (0, *itertools.accumulate(self.counts[:-1]))

    @property
    def padding(self) -> float:
        """The padding of all ranks together, as a fraction of the number of elements."""
        return self.width * len(self.owners) / self.size - 1

    def start(self) -> jax.Array | int:
        """Returns the index of the first element that this rank owns."""
        if self.even and len(self.owners) > 1:
            return lax.axis_index(self.axis) * self.width
        return self._of_rank(self.starts)

    def count(self) -> jax.Array | int:
        """Returns how many elements this rank owns."""
        return self.width if self.even else self._of_rank(self.counts)

    def take(self, x: jax.Array, dim: int) -> jax.Array:
        """Returns this rank's part of a whole dimension, padded with zeros to `width`."""
        if len(self.owners) == 1:
            return x
        part = lax.dynamic_slice_in_dim(_extended(x, dim, self._reach), self.start(), self.width, dim % x.ndim)
        return self.mask(part, dim) if self._runs_into_next else part

    def place(self, part: jax.Array, dim: int) -> jax.Array:
        """Returns the whole dimension with this rank's part in its place and zeros elsewhere: the transpose of `take`.

        Values in the padding are dropped, even if they are not finite.
        """
        if len(self.owners) == 1:
            return part
        dim %= part.ndim
        shape = (*part.shape[:dim], self._reach, *part.shape[dim + 1 :])
        part = self.mask(part, dim) if self._runs_into_next else part
        whole = lax.dynamic_update_slice_in_dim(jnp.zeros(shape, part.dtype), part, self.start(), dim)
        return lax.slice_in_dim(whole, 0, self.size, axis=dim)

    def mask(self, part: jax.Array, dim: int, value: float = 0.0) -> jax.Array:
        """Returns this rank's part with `value` in the padding. The gradients of the padding are zero."""
        if self.even:
            return part
        index = lax.broadcasted_iota(jnp.int32, part.shape, dim % part.ndim)
        return jnp.where(index < self.count(), part, jnp.asarray(value, part.dtype))

    @property
    def _reach(self) -> int:
        """The number of elements up to the end of the last part, padding included."""
        return max(self.size, max(self.starts) + self.width)

    @property
    def _runs_into_next(self) -> bool:
        """Whether the padding of some rank overlaps elements of the next rank."""
        ends = [start + count for start, count in zip(self.starts, self.counts, strict=True)]
        return any(count < self.width and end < self.size for count, end in zip(self.counts, ends, strict=True))

    def _of_rank(self, table: tuple[int, ...]) -> jax.Array | int:
        if len(table) == 1:
            return table[0]
        return jnp.asarray(np.array(table, np.int32))[lax.axis_index(self.axis)]


def _extended(x: jax.Array, dim: int, size: int) -> jax.Array:
    """Returns `x` with a dimension padded with zeros at its end, up to `size`."""
    widths = [(0, 0)] * x.ndim
    widths[dim] = (0, size - x.shape[dim])
    return jnp.pad(x, widths)
