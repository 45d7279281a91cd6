"""Describes how a sharded weight is partitioned in storage and in use."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from ..mesh import Roles, axes_of, current_view, degree, degrees


@dataclasses.dataclass(frozen=True)
class Placement:
    """How a weight is partitioned in storage, and after its gather.

    Attributes:
        stored: the partition of the stored array.
        used: the partition of the gathered array, which names only axes over which the weight is not gathered.
        degrees: the mesh axes that `stored` names, each with its size.
        ndim: the number of dimensions of the array.
        kind: the class of the weight's variable. A variable of another class with this placement in its metadata has
            only copied it, as adapters do, and is not sharded.
    """

    stored: PartitionSpec
    used: PartitionSpec
    degrees: tuple[tuple[str, int], ...]
    ndim: int
    kind: type[nnx.Variable] = nnx.Param

    @property
    def gathered(self) -> bool:
        """Whether the weight must be gathered before use."""
        return _entries(self.stored) != _entries(self.used)

    def used_axes(self, dim: int) -> tuple[str, ...]:
        """Returns the axes that still divide dimension `dim` after the gather."""
        return _axes(self.used, dim)

    def gathered_axes(self, dim: int) -> tuple[str, ...]:
        """Returns the axes over which dimension `dim` is gathered, in the order of `stored`."""
        stored, used = _axes(self.stored, dim), _axes(self.used, dim)
        return tuple(axis for axis in stored if axis not in used)

    def axes(self, dim: int) -> tuple[str, ...]:
        """Returns the axes that divide dimension `dim` of the stored array: first `used_axes`, then `gathered_axes`."""
        return (*self.used_axes(dim), *self.gathered_axes(dim))

    def fits(self, shape: Sequence[int] | None) -> bool:
        """Returns whether an array of this shape can be stored as `stored`; false if the shape is `None`."""
        sizes = dict(self.degrees)
        return (
            shape is not None
            and len(shape) == self.ndim
            and all(size % math.prod(sizes[axis] for axis in self.axes(dim)) == 0 for dim, size in enumerate(shape))
        )

    def check_mesh(self, owner: str) -> None:
        """Raises an error if an axis that shards the weight is missing from the mesh in scope, or has another size
        there.

        Args:
            owner: what was sharded, as the message names it: a weight and its module, or "the model".

        Raises:
            ValueError: if the mesh in scope is such a mesh, or if no mesh is in scope. The message names the sizes.
        """
        found = dict(jax.sharding.get_abstract_mesh().shape)
        if any(found.get(axis) != size for axis, size in self.degrees):
            want = " x ".join(f"{axis} {size}" for axis, size in self.degrees)
            have = " x ".join(f"{axis} {size}" for axis, size in found.items())
            raise ValueError(
                f"{owner} was sharded by `gtp_jax.shard` over {want}, and "
                f"{f'the mesh in scope is {have}' if have else 'no mesh is in scope'}. Call the model under `with "
                "jax.set_mesh(mesh):`, with the mesh for which it was sharded. For another mesh, shard a new model "
                "there, and restore a checkpoint into it."
            )

    def of_slice(self, shape: tuple[int, ...]) -> Placement:
        """Returns the placement of an array with this shape, which is the whole array or a slice of it.

        Scans and vmaps over the first dimension use slices, which lack that dimension.

        Raises:
            ValueError: if the shape has neither as many dimensions as the weight nor one fewer, or if it has one fewer
                and the weight's first dimension is sharded.
        """
        if len(shape) == self.ndim:
            return self
        if len(shape) != self.ndim - 1 or _axes(self.stored, 0):
            raise ValueError(
                f"a weight of {self.ndim} dimensions, which `gtp_jax.shard` stores as {self.stored}, holds an array of "
                f"shape {shape}. A scan or a vmap over it must run over its first dimension, which must stay whole: "
                "name another partition with `specs`. To hold an array of another shape, build the model again with "
                "it, and shard that."
            )
        stored, used = (PartitionSpec(*tuple(spec)[1:]) for spec in (self.stored, self.used))
        return dataclasses.replace(self, stored=stored, used=used, ndim=len(shape))


def placement_of(variable: Any) -> Placement | None:
    """Returns the placement of the array that a variable holds, which may be a slice of the stored weight. Returns
    `None` if `shard` gave the variable no placement, if a holder has gathered it for the current call, or if it has
    copied the metadata of a variable of another class.

    In local view, a weight is gathered over all its axes, tensor axes included: a stock layer's code does not sum over
    tensor ranks, so each rank must compute with the whole weight.

    Raises:
        ValueError: for the same reasons as `Placement.of_slice`.
    """
    placement = variable.get_metadata().get("placement") if isinstance(variable, nnx.Variable) else None
    if placement is None or type(variable) is not placement.kind:
        return None
    placement = placement if current_view() == "global" else dataclasses.replace(placement, used=PartitionSpec())
    shape = getattr(variable.get_raw_value(), "shape", None)
    return placement if shape is None else placement.of_slice(shape)


def place(shape: Sequence[int], roles: Roles, used: PartitionSpec) -> Placement | None:
    """Returns the placement of a weight of this shape on the mesh in scope; `None` for a scalar.

    Tries three ways in turn. First, all axes of the roles `weights` and `optimizer` shard one dimension. Second, the
    axes of `weights` shard one dimension, and those of `optimizer` another. Third, fewer of these axes shard one
    dimension. Among the dimensions that the axes divide evenly, those that `used` leaves whole are preferred, then
    those whose shards are also shards of a matrix (`features_in`), then the longest.

    If no axis divides a dimension, the weight is stored as `used`. It has a placement nevertheless, so that a recipe
    quantizes it, and its values are the same on every mesh.

    Args:
        shape: the logical shape of the weight.
        roles: the roles of the mesh axes.
        used: the partition of the gathered array, which names only axes over which the weight is not gathered.
    """
    taken = axes_of(used)
    weights = _above_one(axis for axis in roles.weights if axis not in taken)
    further = _above_one(axis for axis in roles.over_optimizer if axis not in taken)
    all_axes = (*further, *weights)
    for chosen in ((all_axes,), (weights, further), *((axes,) for axes in _fewer(all_axes, weights))):
        stored = _divided(tuple(shape), used, chosen)
        if stored is not None:
            return placed(stored, used, len(shape))
    return None


def placed(stored: PartitionSpec, used: PartitionSpec, ndim: int) -> Placement:
    """Returns a placement with these partitions on the mesh in scope."""
    axes = [axis for axis in jax.sharding.get_abstract_mesh().axis_names if axis in axes_of(stored)]
    return Placement(stored, used, tuple((axis, degree(axis)) for axis in axes), ndim)


def features_in(shape: Sequence[int]) -> int:
    """Returns how many leading dimensions of a weight are joined into the input features of its matrix. The others are
    joined into the output features.

    If the last dimension is longer than the first, these are all dimensions but the last. Otherwise (a projection to
    heads), it is only the first. The decision depends on nothing but the shape, so that a recipe's blocks are the same
    on every mesh.
    """
    return len(shape) - 1 if shape and shape[-1] > shape[0] else 1


def _divided(shape: tuple[int, ...], used: PartitionSpec, groups: Sequence[tuple[str, ...]]) -> PartitionSpec | None:
    """Returns `used` with each group of axes added to a dimension that the group divides evenly; `None` if a group
    divides no dimension."""
    entries = [_axes(used, dim) for dim in range(len(shape))]
    for axes in groups:
        local = [size // degrees(own) for size, own in zip(shape, entries, strict=True)]
        dims = [dim for dim, size in enumerate(local) if size % degrees(axes) == 0]
        if not dims:
            return None
        starts = (0, features_in(shape))
        dim = max(dims, key=lambda dim: (not entries[dim], dim in starts, local[dim], -dim))  # unsharded ones first
        entries[dim] = (*entries[dim], *axes)
    return _spec(entries)


def _fewer(axes: tuple[str, ...], weights: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Returns all subsets of `axes`, sorted by their number of ranks, largest first. Of two subsets with equally many
    ranks, the one with more axes of `weights` comes first."""
    some = [chosen for count in range(len(axes) + 1) for chosen in itertools.combinations(axes, count)]
    return sorted(some, key=lambda chosen: (-degrees(chosen), -len(set(chosen) & set(weights))))


def _above_one(axes: Any) -> tuple[str, ...]:
    names = jax.sharding.get_abstract_mesh().axis_names
    return tuple(axis for axis in axes if axis in names and degree(axis) > 1)


def _axes(spec: PartitionSpec, dim: int) -> tuple[str, ...]:
    entry = spec[dim] if dim < len(spec) else None
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _entries(spec: PartitionSpec) -> list[tuple[str, ...]]:
    entries = [_axes(spec, dim) for dim in range(len(spec))]
    while entries and not entries[-1]:
        entries.pop()
    return entries


def _spec(entries: Sequence[tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(None if not axes else axes[0] if len(axes) == 1 else axes for axes in entries))


def shards_of(placement: Placement) -> int:
    """Returns the number of distinct shards of a weight."""
    return math.prod(size for _, size in placement.degrees)
