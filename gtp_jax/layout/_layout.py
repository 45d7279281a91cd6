"""The layout of one weight on the mesh: logical in storage, possibly padded in use."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Sequence

from jax.sharding import PartitionSpec

from ..mesh import Roles, axes_of, current_roles, degree, degrees
from ._split import Split

# Blocks of formats have up to 16 rows on the wire and up to 32 elements along a contraction. Where sizes allow it a
# shard has whole blocks, so that each rank can quantize its own.
BLOCK_ROWS, BLOCK = 16, 32

# Elements of a shard up to which no word is lost about a replica of it on each rank of the optimizer's axes.
SMALL = 1 << 16


@dataclasses.dataclass(frozen=True)
class Layout:
    """A weight's storage and its use.

    *Storage* is what users, optimizers and checkpoints see: an array of the logical shape, each dimension divided
    evenly by the mesh axes that shard it. A *shard* is what a rank sends when the weight is gathered: what it stores,
    or that gathered over `optimizer_axes`, where these divide storage further. *Use* is what a rank multiplies with:
    the weight gathered over `axes`; where ranks of the tensor axis own unequal parts of it (`split`), this rank's part,
    padded to the longest.

    Attributes:
        shape: logical shape: a matrix, or matrices behind leading dimensions (experts).
        rows: the dimension of output features, which become the rows of the gathered matrix.
        split_dim: the dimension that the tensor axis divides, or `None`.
        split: how it divides it, or `None`.
        shard_dim: the dimension that `axes` shard.
        axes: the mesh axes that a gather runs over, outermost first; none if the weight is whole on all of them.
        degrees: sizes of `axes`.
        takes_part: whether storage is not sharded over the tensor axis, so that each rank takes its part of what was
            gathered. So it is where the split of any kernel of a gather is uneven.
        roles: of the mesh axes.
        optimizer_axes: the mesh axes that divide a shard in storage, outermost first.
        optimizer_degrees: sizes of `optimizer_axes`.
        optimizer_dim: the dimension that they divide, or `None`.
        experts_axis: the mesh axis whose ranks have experts of their own, in storage and in use, equally many: a
            contiguous run of the first dimension. What a gather joins, and what the tensor axis divides, is a rank's
            own. `None` if all its ranks have all.
        experts_degree: size of `experts_axis`.

    Raises:
        ValueError: if the axes that shard a dimension do not divide it.
    """

    shape: tuple[int, ...]
    rows: int
    split_dim: int | None = None
    split: Split | None = None
    shard_dim: int | None = None
    axes: tuple[str, ...] = ()
    degrees: tuple[int, ...] = ()
    takes_part: bool = False
    roles: Roles = Roles()
    optimizer_axes: tuple[str, ...] = ()
    optimizer_degrees: tuple[int, ...] = ()
    optimizer_dim: int | None = None
    experts_axis: str | None = None
    experts_degree: int = 1

    def __post_init__(self) -> None:
        if self.shard_dim is None:
            object.__setattr__(self, "shard_dim", self.rows)
        if not self.takes_part and self.split is not None and not self.split.even:
            raise ValueError(
                f"the tensor axis divides dimension {self.split_dim} of a weight of shape {self.shape} unevenly, "
                f"{self.split.owners} units a rank, so storage cannot be sharded over it. Pass `takes_part=True`."
            )
        for dim, size in enumerate(self.shape):
            parts = self._parts(dim) * (self.copies if dim == self.optimizer_dim else 1)
            if size % parts:
                raise ValueError(
                    f"dimension {dim} of a weight of shape {self.shape} is sharded {parts} ways, which do not divide "
                    f"{size}. Let `layouts_of_kernels` choose the dimension."
                )

    def __repr__(self) -> str:
        """Returns shape and partition. Layouts that differ only in use have the same text."""
        return f"Layout(shape={self.shape}, spec={self.spec})"

    @property
    def ranks(self) -> int:
        """Returns how many shards a gather joins."""
        return math.prod(self.degrees)

    @property
    def copies(self) -> int:
        """Returns how many ranks divide a shard in storage among them: 1 if each stores it whole."""
        return math.prod(self.optimizer_degrees)

    @property
    def tensor_degree(self) -> int:
        """Returns how many ranks of the tensor axis divide the weight in use."""
        return 1 if self.split is None else len(self.split.owners)

    @property
    def cols(self) -> int:
        """The dimension of input features."""
        first = len(self.shape) - 2
        return 2 * first + 1 - self.rows

    @property
    def by_rows(self) -> bool:
        """Returns whether shards are whole rows of the gathered matrix."""
        return self.shard_dim == self.rows

    @property
    def splits_experts(self) -> bool:
        """Returns whether tensor ranks have matrices (experts) of their own, instead of parts of each."""
        return self.split_dim is not None and self.split_dim < len(self.shape) - 2

    @property
    def spec(self) -> PartitionSpec:
        """Partition of the stored array."""
        entries: list[list[str]] = [[] for _ in self.shape]
        if self.experts_axis is not None:
            entries[0].append(self.experts_axis)
        if self._stored_split is not None and self.split is not None and self.split.axis is not None:
            entries[self._stored_split].append(self.split.axis)
        entries[self.shard_dim or 0] += self.axes
        entries[self.optimizer_dim or 0] += self.optimizer_axes  # innermost, so that they join to a shard
        return PartitionSpec(*(None if not e else e[0] if len(e) == 1 else tuple(e) for e in entries))

    @property
    def matrix_spec(self) -> PartitionSpec:
        """Partition of the stored array with the rows of the gathered matrix first: `(*experts, rows, cols)`."""
        entries = tuple(self.spec)
        return PartitionSpec(*entries[:-2], entries[self.rows], entries[self.cols])

    @property
    def shards(self) -> int:
        """Returns how many different shards a weight has."""
        return self.ranks * self.experts_degree * (1 if self._stored_split is None else self.tensor_degree)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of what one rank sends in a gather."""
        return tuple(size // self._parts(d) for d, size in enumerate(self.shape))

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of what one rank stores."""
        return tuple(
            size // self.copies if d == self.optimizer_dim else size for d, size in enumerate(self.shard_shape)
        )

    @property
    def of_shards(self) -> Layout:
        """The layout of the same weight, stored as shards."""
        return dataclasses.replace(self, optimizer_axes=(), optimizer_degrees=(), optimizer_dim=None)

    @property
    def gathered(self) -> Layout:
        """The layout of the same weight, stored as what a gather makes of it: the axes of the gather and of the
        optimizer divide nothing."""
        return dataclasses.replace(self.of_shards, shard_dim=None, axes=(), degrees=())

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
        built = dict(zip(self.axes, self.degrees, strict=True))
        if self.split is not None and self.split.axis is not None:
            built[self.split.axis] = self.tensor_degree
        if self.experts_axis is not None:
            built[self.experts_axis] = self.experts_degree
        built |= dict(zip(self.optimizer_axes, self.optimizer_degrees, strict=True))
        here = {axis: degree(axis) for axis in built}
        if built != here:
            raise ValueError(
                f"{name} was built for a mesh with {_listed(built)}; the mesh in scope has {_listed(here)}. Build the "
                "model under that mesh: `with jax.set_mesh(mesh): model = gtp_jax.init(...)`."
            )

    def _parts(self, dim: int) -> int:
        """Returns how many shards divide a dimension."""
        of_tensor = self.tensor_degree if dim == self._stored_split else 1
        return of_tensor * (self.ranks if dim == self.shard_dim else 1) * (self.experts_degree if dim == 0 else 1)

    @property
    def _own_shape(self) -> tuple[int, ...]:
        """Shape of the weight as far as it belongs to this rank's experts."""
        return (self.shape[0] // self.experts_degree, *self.shape[1:])

    @property
    def _stored_split(self) -> int | None:
        """The dimension that the tensor axis shards in storage, if it does."""
        return None if self.takes_part else self.split_dim


def layouts_of_kernels(
    shapes: Sequence[tuple[int, ...]],
    *,
    rows: int,
    split_dim: int | None = None,
    units: Sequence[int] | None = None,
    axes: tuple[str, ...] | None = None,
    experts_axis: str | None = None,
) -> tuple[Layout, ...]:
    """Lays out kernels that meet the same input, and travel in one gather, on the mesh in scope.

    All get the same axes, and are sharded along rows or all along columns: rows if every shard then has whole blocks,
    else columns if every shard has, else whichever dimension divides. What is stored is divided further over the
    optimizer's axes, by the same rule, and stays whole over those that divide neither dimension, with a warning unless
    it is small. Where the tensor axis does not divide the units of a kernel evenly, storage is sharded over that axis
    too, and gathered over it. Kernels of which the axes divide no dimension are gathered over fewer axes, as many ranks
    as can be, with a warning.

    Args:
        shapes: logical shapes, equal but for the rows.
        rows: the dimension of output features.
        split_dim: the dimension that the tensor axis divides, if any.
        units: elements a unit of that dimension, for each kernel; 1 by default.
        axes: gather over these; the roles in scope say which by default.
        experts_axis: the axis whose ranks divide the first dimension, if any; see `Layout`.

    Raises:
        ValueError: if `axes` is no tuple of different axes, or has an axis that divides the weight already; or if the
            ranks of `experts_axis` do not divide the experts.
    """
    roles = current_roles()
    axes = (roles.weights if experts_axis is None else roles.over_experts) if axes is None else axes
    if not isinstance(axes, tuple) or len(set(axes)) < len(axes):
        raise ValueError(f"`axes` is {axes!r}; it must be a tuple of different mesh axes, such as ('gtp',).")
    experts = degree(experts_axis)
    if experts_axis is not None:
        if experts_axis in axes:
            raise ValueError(
                f"`axes` {axes} of a weight of shape {shapes[0]} has {experts_axis!r}, whose ranks have experts of "
                "their own, which are not gathered over it. Leave it out."
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
                f"`axes` {axes} of a weight of shape {shapes[0]} has {roles.tensor!r}, which divides its dimension "
                f"{split_dim} already. Leave it out, or choose `parallel=None`."
            )
        units = [1] * len(shapes) if units is None else units
        splits = [
            Split.in_blocks(shape[split_dim] // (experts if split_dim == 0 else 1), unit, roles.tensor)
            for shape, unit in zip(shapes, units, strict=True)
        ]
    even = all(split is None or split.even for split in splits)
    parts = degree(roles.tensor) if split_dim is not None and even else 1
    local = [
        tuple(size // ((parts if d == split_dim else 1) * (experts if d == 0 else 1)) for d, size in enumerate(shape))
        for shape in shapes
    ]
    cols = 2 * len(shapes[0]) - 3 - rows
    for chosen in axes_choices(axes, None if even else roles.tensor):
        ranks = degrees(chosen)
        dim = _dim_divided(local, ranks, rows, cols)
        if dim is not None:
            warn_of_whole(shapes[0], [axis for axis in axes if axis not in chosen])
            sizes = tuple(map(degree, chosen))
            layouts = tuple(
                Layout(
                    shape,
                    rows,
                    split_dim,
                    split,
                    dim,
                    chosen,
                    sizes,
                    not even,
                    roles,
                    experts_axis=experts_axis,
                    experts_degree=experts,
                )
                for shape, split in zip(shapes, splits, strict=True)
            )
            return _divided_further(layouts)
    raise AssertionError("a choice of no axes divides everything")


def _dim_divided(shapes: Sequence[tuple[int, ...]], ranks: int, rows: int, cols: int) -> int | None:
    """Returns the dimension of all these shapes that so many ranks divide, if any: in whole blocks if they can."""
    for dim, multiple in ((rows, BLOCK_ROWS), (cols, BLOCK), (rows, 1), (cols, 1)):
        if ranks == 1 or all(shape[dim] % (ranks * multiple) == 0 for shape in shapes):
            return dim if ranks > 1 else rows
    return None


def _divided_further(layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
    """Returns the layouts, their shards divided over the optimizer's axes, as many ranks as can be."""
    first = layouts[0]
    taken = (*first.axes, first.experts_axis)
    axes = tuple(axis for axis in first.roles.over_optimizer if axis not in taken and degree(axis) > 1)
    shapes = [layout.shard_shape for layout in layouts]
    for chosen in axes_choices(axes, None):
        dim = _dim_divided(shapes, degrees(chosen), first.rows, first.cols)
        if dim is not None:
            if sum(map(math.prod, shapes)) > SMALL:
                warn_of_whole(first.shape, [axis for axis in axes if axis not in chosen])
            further = {"optimizer_axes": chosen, "optimizer_degrees": tuple(map(degree, chosen))}
            dims = {"optimizer_dim": dim if chosen else None}
            return tuple(dataclasses.replace(layout, **further, **dims) for layout in layouts)
    raise AssertionError("a choice of no axes divides everything")


def axes_choices(axes: tuple[str, ...], tensor: str | None) -> list[tuple[str, ...]]:
    """Returns the axes that a gather may run over: those of most ranks first, down to none.

    Args:
        axes: which are wanted.
        tensor: the tensor axis, if it divides a weight unevenly and may shard its storage like the others.
    """
    some = [chosen for count in range(len(axes) + 1) for chosen in itertools.combinations(axes, count)]
    if tensor is not None and tensor not in axes:
        some += [(tensor, *chosen) for chosen in some]
    return sorted(some, key=lambda chosen: (-degrees(chosen), -len(chosen)))


def warn_of_whole(shape: tuple[int, ...], axes: Sequence[str]) -> None:
    """Warns of a weight that stays whole over axes of more than one rank."""
    sizes = {axis: degree(axis) for axis in axes if degree(axis) > 1}
    if sizes:
        warnings.warn(
            f"a weight of shape {shape} stays whole on every rank of {_listed(sizes)}, which cannot divide its "
            "dimensions further. Choose sizes that the degrees divide if it is large.",
            stacklevel=4,
        )


def axes_in_use(layouts: Sequence[Layout]) -> frozenset[str]:
    """Returns the mesh axes that shard any of these weights in storage, or divide them in use."""
    axes: set[str] = set()
    for layout in layouts:
        axes |= axes_of(layout.spec)
        if layout.split is not None and layout.split.axis is not None:
            axes.add(layout.split.axis)
    return frozenset(axes)


def _listed(sizes: dict[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items()) or "no axes"
