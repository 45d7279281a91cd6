"""How a weight is stored: as an array, padded where needed, that mesh axes divide evenly."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from jax.sharding import PartitionSpec

from ..mesh import spec_by_dim


class Division(NamedTuple):
    """Mesh axes that divide one dimension of an array into equal parts.

    Attributes:
        dim: the dimension; `None` if there are no axes.
        axes: the names of the mesh axes, outermost first.
        degrees: the sizes of `axes`.
    """

    dim: int | None = None
    axes: tuple[str, ...] = ()
    degrees: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        """The number of parts."""
        return math.prod(self.degrees)


UNDIVIDED = Division()


class Padding(NamedTuple):
    """Zeros at the end of one dimension of an array.

    Attributes:
        dim: the dimension; `None` if nothing is padded.
        size: the number of elements that are added to it.
    """

    dim: int | None = None
    size: int = 0

    def added_to(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of an array with the zeros, given that without them."""
        return tuple(size + self.size * (dim == self.dim) for dim, size in enumerate(shape))

    def removed_from(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of an array without the zeros, given that with them."""
        return tuple(size - self.size * (dim == self.dim) for dim, size in enumerate(shape))


UNPADDED = Padding()


@dataclasses.dataclass(frozen=True)
class Storage:
    """A weight between steps.

    Each dimension of the stored array is divided evenly by the axes that shard it; zeros at the end of one dimension
    may make it longer. A *shard* is what a rank sends when the weight is gathered: what it
    stores, first gathered over the axes of `optimizer` if they divide storage further (ZeRO). Zeros in a dimension that
    only these axes divide are removed there, so that shards do not contain them.

    Attributes:
        shape: the logical shape: a matrix, or matrices with leading dimensions (experts).
        gather: the axes that a gather runs over; `UNDIVIDED` if the weight is not sharded over any.
        optimizer: the axes that divide a shard in storage.
        tensor: the tensor axis, if it shards storage and the gather does not run over it.
        experts: the axis whose ranks each have the same number of experts of their own, in storage and in use: a
            contiguous run of the first dimension. Gathers and the tensor axis act within the experts of one rank.
        padding: the zeros at the end of a dimension of the stored array; `UNPADDED` if there are none.

    Raises:
        ValueError: if the axes that shard a dimension do not divide it, or a padded dimension is divided by axes other
            than those of `gather` and `optimizer`, so that the padding would not be at its end.
    """

    shape: tuple[int, ...]
    gather: Division = UNDIVIDED
    optimizer: Division = UNDIVIDED
    tensor: Division = UNDIVIDED
    experts: Division = UNDIVIDED
    padding: Padding = UNPADDED

    def __post_init__(self) -> None:
        for dim, size in enumerate(self.array_shape):
            parts = self._parts(dim, stored=True)
            if size % parts:
                raise ValueError(
                    f"dimension {dim} of a weight of shape {self.shape} is sharded {parts} ways, which does not divide "
                    f"{size}. Let `layouts_of_kernels` choose the dimension."
                )
        if any(one.ranks > 1 and one.dim == self.padding.dim for one in (self.tensor, self.experts)):
            raise ValueError(
                f"dimension {self.padding.dim} of a weight of shape {self.shape} is padded, and divided among the "
                "ranks of tp or ep too, each of which would have padding of its own. Let `layouts_of_kernels` choose "
                "the dimension."
            )

    @property
    def array_shape(self) -> tuple[int, ...]:
        """The shape of the stored array, padding included."""
        return self.padding.added_to(self.shape)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that a gather runs over, outermost first."""
        return self.gather.axes

    @property
    def ranks(self) -> int:
        """The number of shards that a gather joins."""
        return self.gather.ranks

    @property
    def copies(self) -> int:
        """The number of ranks that divide a shard in storage; 1 if each stores it whole."""
        return self.optimizer.ranks

    @property
    def shards(self) -> int:
        """The number of different shards of the weight."""
        return self.ranks * self.experts.ranks * self.tensor.ranks

    @property
    def spec(self) -> PartitionSpec:
        """The partition spec of the stored array."""
        entries: list[list[str]] = [[] for _ in self.shape]
        # the optimizer's axes are innermost, so that gathering over them yields a shard
        for dim, axes, _ in (self.experts, self.tensor, self.gather, self.optimizer):
            if dim is not None:
                entries[dim] += axes
        return spec_by_dim(entries)

    @property
    def shard_padding(self) -> Padding:
        """The zeros at the end of a dimension of the array that all shards form together: those of the stored array,
        unless only the axes of `optimizer` divide the padded dimension."""
        return self.padding if self.ranks > 1 and self.padding.dim == self.gather.dim else UNPADDED

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of what one rank sends in a gather."""
        sizes = self.array_shape if self.shard_padding.size else self.shape
        return tuple(size // self._parts(dim, stored=False) for dim, size in enumerate(sizes))

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of what one rank stores."""
        return tuple(size // self._parts(dim, stored=True) for dim, size in enumerate(self.array_shape))

    @property
    def degrees(self) -> dict[str, int]:
        """The sizes of all mesh axes that divide the array, by name."""
        every = (self.gather, self.tensor, self.experts, self.optimizer)
        return {axis: size for _, axes, sizes in every for axis, size in zip(axes, sizes, strict=True)}

    def _parts(self, dim: int, *, stored: bool) -> int:
        """Returns the number of parts into which sharding divides a dimension; with `stored`, counts the optimizer's
        axes too."""
        divisions = (self.gather, self.tensor, self.experts, *([self.optimizer] if stored else []))
        return math.prod(one.ranks for one in divisions if one.dim == dim)
