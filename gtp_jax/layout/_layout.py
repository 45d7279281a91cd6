"""The layout of one weight on the mesh: how it is stored, and how it is used."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
from jax.sharding import PartitionSpec

from ..mesh import Roles, axes_of, degree
from ._split import Split
from ._storage import UNDIVIDED, UNPADDED, Storage


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout(Storage):
    """How a weight is stored, and how it is used.

    The weight *in use* is what a rank multiplies by: the weight gathered over `axes`. If the ranks of the tensor axis
    own parts of different sizes (`split`), it is this rank's part, padded to the longest.

    Attributes:
        rows: the dimension of output features, which become the rows of the gathered matrix.
        split_dim: the dimension that the tensor axis divides, or `None`.
        split: how the tensor axis divides that dimension, or `None`.
        roles: the roles of the mesh axes.
        even: the layout with padding that a `TrainState` gives the weight, if this one stores it whole over some axes
            (`even_shares`); otherwise `None`. Layouts are compared without it.

    Raises:
        ValueError: if `tensor` is given, but the tensor axis divides the weight unevenly.
    """

    rows: int
    split_dim: int | None = None
    split: Split | None = None
    roles: Roles = Roles()
    even: Layout | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.split is not None and not self.split.even and self.tensor.dim is not None:
            raise ValueError(
                f"the tensor axis divides dimension {self.split_dim} of a weight of shape {self.shape} unevenly, "
                f"{self.split.owners} units per rank, so storage cannot be sharded over it. Leave `tensor` out."
            )
        super().__post_init__()

    def __repr__(self) -> str:
        """Returns the shape and the partition spec. Layouts that differ only in use have the same text."""
        return f"Layout(shape={self.shape}, spec={self.spec})"

    @property
    def takes_part(self) -> bool:
        """Whether the gathered weight has the parts of all ranks of the tensor axis, of which each rank takes its own.
        This is so for all kernels of a gather if the split of any of them is uneven."""
        return self.split is not None and self.split.axis is not None and self.tensor.dim is None

    @property
    def tensor_degree(self) -> int:
        """The number of ranks of the tensor axis that divide the weight in use."""
        return 1 if self.split is None else len(self.split.owners)

    @property
    def cols(self) -> int:
        """The dimension of input features."""
        first = len(self.shape) - 2
        return 2 * first + 1 - self.rows

    @property
    def by_rows(self) -> bool:
        """Whether shards are whole rows of the gathered matrix."""
        return self.gather.dim in (None, self.rows)

    @property
    def splits_experts(self) -> bool:
        """Whether each tensor rank has whole matrices (experts) of its own, instead of a part of every matrix."""
        return self.split_dim is not None and self.split_dim < len(self.shape) - 2

    @property
    def matrix_spec(self) -> PartitionSpec:
        """The partition spec of the stored array, with dimensions in the order of the gathered matrix: `(*experts,
        rows, cols)`."""
        entries = tuple(self.spec)
        return PartitionSpec(*entries[:-2], entries[self.rows], entries[self.cols])

    @property
    def of_shards(self) -> Layout:
        """The layout of the same weight if whole shards are stored, not divided over the axes of the optimizer."""
        return dataclasses.replace(self, optimizer=UNDIVIDED, padding=self.shard_padding)

    @property
    def gathered(self) -> Layout:
        """The layout of the same weight if it is stored as gathered: not padded, and not divided over the axes of the
        gather and of the optimizer."""
        return dataclasses.replace(self.of_shards, gather=UNDIVIDED, padding=UNPADDED)

    @property
    def with_padding(self) -> Layout:
        """The layout of the stored array, whose padding counts as part of the weight."""
        return dataclasses.replace(self, shape=self.array_shape, padding=UNPADDED)

    @property
    def of_rank(self) -> Layout:
        """The layout of the rows that one rank sends in a gather, as a weight of its own that is not gathered.

        Requires that shards are whole rows (`by_rows`) without padding, and that the tensor axis, if it divides rows,
        divides them evenly in storage.
        """
        assert self.by_rows and not self.takes_part and not self.shard_padding.size, self
        shape = tuple(size // self.ranks if d == self.rows else size for d, size in enumerate(self.shape))
        split = self.split
        if split is not None and self.split_dim == self.rows:
            owners = tuple(units // self.ranks for units in split.owners)
            split = dataclasses.replace(split, size=split.size // self.ranks, owners=owners)
        return dataclasses.replace(self, shape=shape, gather=UNDIVIDED, split=split)

    @property
    def use_shape(self) -> tuple[int, ...]:
        """The shape of what one rank multiplies by, padding included, with the dimensions in stored order."""
        width = 0 if self.split is None else self.split.width
        return tuple(width if d == self.split_dim else size for d, size in enumerate(self._own_shape))

    @property
    def joined_shape(self) -> tuple[int, ...]:
        """The shape of the shards that a gather joins, their padding included."""
        return tuple(size * (self.ranks if d == self.gather.dim else 1) for d, size in enumerate(self.shard_shape))

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the weight that a gather returns, without the padding of the stored array, before each rank
        takes its part of an uneven split."""
        return self._own_shape if self.takes_part else self.use_shape

    def matrix_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns `(rows, columns)` of a shape whose dimensions are in the order of this weight's."""
        return shape[self.rows], shape[self.cols]

    @property
    def matrices(self) -> int:
        """The number of matrices in a shard: the experts, or 1 if the weight is a single matrix."""
        return math.prod(self.shard_shape[:-2])

    def check_mesh(self, name: str) -> None:
        """Checks that the axes that divide the weight have the same degrees in the mesh in scope.

        Raises:
            ValueError: if it has other degrees, or no mesh is in scope and a degree is above 1.
        """
        tensor = {} if self.split is None or self.split.axis is None else {self.split.axis: self.tensor_degree}
        built = self.degrees | tensor
        here = {axis: degree(axis) for axis in built}
        if built == here:
            return
        if jax.sharding.get_abstract_mesh().empty:
            raise ValueError(
                f"{name} was built for a mesh with {listed(built)}; no mesh is in scope. Use the model under its mesh: "
                "`with jax.set_mesh(mesh): ...`."
            )
        raise ValueError(
            f"{name} was built for a mesh with {listed(built)}; the mesh in scope has {listed(here)}. Build the model "
            "under that mesh: `with jax.set_mesh(mesh): model = gtp_jax.init(...)`."
        )

    @property
    def _own_shape(self) -> tuple[int, ...]:
        """The shape of the part of the weight that belongs to this rank's experts."""
        return (self.shape[0] // self.experts.ranks, *self.shape[1:])


def axes_in_use(layouts: Sequence[Layout]) -> frozenset[str]:
    """Returns the mesh axes that shard any of these weights in storage, or divide them in use."""
    axes: set[str] = set()
    for layout in layouts:
        axes |= axes_of(layout.spec)
        if layout.split is not None and layout.split.axis is not None:
            axes.add(layout.split.axis)
    return frozenset(axes)


def listed(sizes: dict[str, int]) -> str:
    """Returns mesh axes and their sizes as text for a message."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items()) or "no axes"
