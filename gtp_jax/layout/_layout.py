"""The layout of one weight on the mesh: logical in storage, possibly padded in use."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jax.sharding import PartitionSpec

from ..mesh import Roles, axes_of, degree
from ._split import Split
from ._storage import UNDIVIDED, Storage


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout(Storage):
    """A weight's storage and its use.

    *Use* is what a rank multiplies with: the weight gathered over `axes`; where ranks of the tensor axis own unequal
    parts of it (`split`), this rank's part, padded to the longest.

    Attributes:
        rows: the dimension of output features, which become the rows of the gathered matrix.
        split_dim: the dimension that the tensor axis divides, or `None`.
        split: how it divides it, or `None`.
        roles: of the mesh axes.

    Raises:
        ValueError: if storage is sharded over a tensor axis that divides the weight unevenly.
    """

    rows: int
    split_dim: int | None = None
    split: Split | None = None
    roles: Roles = Roles()

    def __post_init__(self) -> None:
        if self.split is not None and not self.split.even and self.tensor.dim is not None:
            raise ValueError(
                f"the tensor axis divides dimension {self.split_dim} of a weight of shape {self.shape} unevenly, "
                f"{self.split.owners} units a rank, so storage cannot be sharded over it. Leave `tensor` out."
            )
        super().__post_init__()

    def __repr__(self) -> str:
        """Returns shape and partition. Layouts that differ only in use have the same text."""
        return f"Layout(shape={self.shape}, spec={self.spec})"

    @property
    def takes_part(self) -> bool:
        """Whether storage is not sharded over the tensor axis, so that each rank takes its part of what was gathered.
        So it is where the split of any kernel of a gather is uneven."""
        return self.split is not None and self.split.axis is not None and self.tensor.dim is None

    @property
    def tensor_degree(self) -> int:
        """How many ranks of the tensor axis divide the weight in use."""
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
        """Whether tensor ranks have matrices (experts) of their own, instead of parts of each."""
        return self.split_dim is not None and self.split_dim < len(self.shape) - 2

    @property
    def matrix_spec(self) -> PartitionSpec:
        """Partition of the stored array with the rows of the gathered matrix first: `(*experts, rows, cols)`."""
        entries = tuple(self.spec)
        return PartitionSpec(*entries[:-2], entries[self.rows], entries[self.cols])

    @property
    def of_shards(self) -> Layout:
        """The layout of the same weight, stored as shards."""
        return dataclasses.replace(self, optimizer=UNDIVIDED)

    @property
    def gathered(self) -> Layout:
        """The layout of the same weight, stored as what a gather makes of it: the axes of the gather and of the
        optimizer divide nothing."""
        return dataclasses.replace(self.of_shards, gather=UNDIVIDED)

    @property
    def use_shape(self) -> tuple[int, ...]:
        """Shape of what one rank multiplies with, padding included, in the dimensions' stored order."""
        width = 0 if self.split is None else self.split.width
        return tuple(width if d == self.split_dim else size for d, size in enumerate(self._own_shape))

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of what a gather makes of the shards, before an uneven split takes its part."""
        return self._own_shape if self.takes_part else self.use_shape

    def matrix_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns rows and columns of a shape of this weight's kind."""
        return shape[self.rows], shape[self.cols]

    @property
    def matrices(self) -> int:
        """Returns how many matrices one rank has: its experts; 1 of a weight that is a matrix itself."""
        return math.prod(self.shard_shape[:-2])

    def check_mesh(self, name: str) -> None:
        """Refuses a mesh in scope of other degrees than the weight was laid out for.

        Raises:
            ValueError: naming both, and the remedy.
        """
        tensor = {} if self.split is None or self.split.axis is None else {self.split.axis: self.tensor_degree}
        built = self.degrees | tensor
        here = {axis: degree(axis) for axis in built}
        if built != here:
            raise ValueError(
                f"{name} was built for a mesh with {listed(built)}; the mesh in scope has {listed(here)}. Build the "
                "model under that mesh: `with jax.set_mesh(mesh): model = gtp_jax.init(...)`."
            )

    @property
    def _own_shape(self) -> tuple[int, ...]:
        """Shape of the weight as far as it belongs to this rank's experts."""
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
    """Returns mesh axes and their sizes as a message names them."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items()) or "no axes"
