"""Where a weight of any shape lives: how mesh axes divide it in storage, and after its gather."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Self

from jax.sharding import PartitionSpec

from ..mesh import axes_by_dim
from ._storage import UNPADDED, Padding


@dataclasses.dataclass(frozen=True)
class Placement:
    """How an array is partitioned in storage, and after its gather: a weight of a module that gtp_jax did not write, or
    the codes of a frozen weight, or their scales.

    Attributes:
        stored: the partition of the stored array.
        used: the partition of the gathered array. It names only axes over which the weight is not gathered.
        degrees: the mesh axes that `stored` names, each with its size.
        shape: the logical shape for which the placement was made.
        padding: the dimension in which the stored array is padded, and by how many elements; `UNPADDED` if it is not
            padded. No axis of `used` divides this dimension. The gathered array has no padding.
        even: the placement with padding that a `TrainState` gives the weight, if this one stores it whole over some
            axes (`even_shares`); otherwise `None`. Placements are compared without it.
    """

    stored: PartitionSpec
    used: PartitionSpec
    degrees: tuple[tuple[str, int], ...]
    shape: tuple[int, ...]
    padding: Padding = UNPADDED
    even: Placement | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def ndim(self) -> int:
        """The number of dimensions of the weight."""
        return len(self.shape)

    @property
    def spec(self) -> PartitionSpec:
        """The partition of the stored array."""
        return self.stored

    @property
    def array_shape(self) -> tuple[int, ...]:
        """The shape of the stored array, padding included."""
        return self.padding.added_to(self.shape)

    @property
    def gathered(self) -> bool:
        """Whether the weight must be gathered before use."""
        return axes_by_dim(self.stored, self.ndim) != axes_by_dim(self.used, self.ndim)

    def used_axes(self, dim: int) -> tuple[str, ...]:
        """Returns the axes that still divide dimension `dim` after the gather."""
        return axes_by_dim(self.used, self.ndim)[dim]

    def gathered_axes(self, dim: int) -> tuple[str, ...]:
        """Returns the axes over which dimension `dim` is gathered, in the order of `stored`."""
        used = self.used_axes(dim)
        return tuple(axis for axis in axes_by_dim(self.stored, self.ndim)[dim] if axis not in used)

    def axes(self, dim: int) -> tuple[str, ...]:
        """Returns the axes that divide dimension `dim` of the stored array: first `used_axes`, then `gathered_axes`."""
        return (*self.used_axes(dim), *self.gathered_axes(dim))

    def fits(self, shape: Sequence[int] | None) -> bool:
        """Returns whether an array of this shape can be stored with this placement; `False` if the shape is `None`. If
        the weight is padded, only its logical shape and the shape of the stored array fit."""
        if shape is not None and self.padding.size:
            return tuple(shape) in (self.shape, self.array_shape)
        return (
            shape is not None
            and len(shape) == self.ndim
            and all(size % self.parts(dim) == 0 for dim, size in enumerate(shape))
        )

    def parts(self, dim: int) -> int:
        """Returns the number of parts into which dimension `dim` of the stored array is divided."""
        sizes = dict(self.degrees)
        return math.prod(sizes[axis] for axis in self.axes(dim))

    def without_padding(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the logical shape, given that of the stored array."""
        return self.padding.removed_from(shape)

    def with_padding(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the stored array, given the logical shape. Also converts the shape of a part of the
        weight that is whole in the padded dimension."""
        return self.padding.added_to(shape)

    @property
    def without_first(self) -> Self:
        """The placement of a slice without the first dimension, which must be neither sharded nor padded."""
        stored, used = (PartitionSpec(*tuple(spec)[1:]) for spec in (self.stored, self.used))
        padding = self.padding if self.padding.dim is None else Padding(self.padding.dim - 1, self.padding.size)
        return dataclasses.replace(self, stored=stored, used=used, shape=self.shape[1:], padding=padding)

    @property
    def without_whole_first(self) -> Self:
        """The placement of a slice without the first dimension if no axis divides that dimension, because a loop may
        then run over it; otherwise this placement."""
        return self if self.axes(0) else self.without_first


def shards_of(placement: Placement) -> int:
    """Returns the number of distinct shards of a weight."""
    return math.prod(size for _, size in placement.degrees)
