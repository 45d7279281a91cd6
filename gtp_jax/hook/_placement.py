"""Decides and describes how weights are partitioned in storage, and after their gather."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from ..layout import BLOCK, BLOCK_ROWS, UNPADDED, PaddedLayout, Padding, Target, choose_padding, shares_are_even
from ..mesh import Roles, axes_by_dim, axes_of, current_view, degree, degrees, spec_by_dim
from ._path import path_of


@dataclasses.dataclass(frozen=True)
class Placement:
    """How a weight is partitioned in storage, and after its gather.

    Attributes:
        stored: the partition of the stored array.
        used: the partition of the gathered array. It names only axes over which the weight is not gathered.
        degrees: the mesh axes that `stored` names, each with its size.
        shape: the logical shape for which the placement was made.
        padding: the dimension in which the stored array is padded, and by how many elements; `UNPADDED` if it is not
            padded. No axis of `used` divides this dimension. The gathered array has no padding.
        kind: the class of the weight's variable. A variable of another class with this placement in its metadata, such
            as an adapter, has only copied it, and does not count as sharded.
    """

    stored: PartitionSpec
    used: PartitionSpec
    degrees: tuple[tuple[str, int], ...]
    shape: tuple[int, ...]
    padding: Padding = UNPADDED
    kind: type[nnx.Variable] = nnx.Param

    @property
    def ndim(self) -> int:
        """The number of dimensions of the weight."""
        return len(self.shape)

    @property
    def array_shape(self) -> tuple[int, ...]:
        """The shape of the stored array, padding included."""
        return self._with(self.shape, self.padding.size)

    @property
    def padded(self) -> PaddedLayout | None:
        """The layout of the stored array; `None` if it is not padded. The layout leaves out a first dimension that no
        axis divides, because a loop may run over it."""
        if not self.padding.size:
            return None
        first = 0 if self.axes(0) else 1
        spec = PartitionSpec(*tuple(self.stored)[first:])
        return PaddedLayout(self.shape[first:], self.array_shape[first:], spec, self.shape[:first])

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
        return self._with(shape, -self.padding.size)

    def with_padding(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the stored array, given the logical shape. Also converts the shape of a part of the
        weight that is whole in the padded dimension."""
        return self._with(shape, self.padding.size)

    def cut(self, array: jax.Array) -> jax.Array:
        """Returns a gathered array without its padding."""
        dim = self.padding.dim
        return array if dim is None else lax.slice_in_dim(array, 0, self.shape[dim], axis=dim)

    def pad(self, array: jax.Array) -> jax.Array:
        """Adds the padding of the stored array to an array of the logical shape, and returns the result."""
        if self.padding.dim is None:
            return array
        return jnp.pad(array, [(0, self.padding.size if dim == self.padding.dim else 0) for dim in range(self.ndim)])

    def _with(self, shape: Sequence[int], more: int) -> tuple[int, ...]:
        return tuple(size + more * (dim == self.padding.dim) for dim, size in enumerate(shape))

    def check_mesh(self, owner: str) -> None:
        """Checks that the mesh in scope has the axes that shard the weight, with the sizes that they had when the
        weight was sharded.

        Args:
            owner: what was sharded, as the message names it: a weight and its module, or "the model".

        Raises:
            ValueError: if such an axis is missing or has another size.
        """
        found = dict(jax.sharding.get_abstract_mesh().shape)
        if any(found.get(axis) != size for axis, size in self.degrees):
            want = " x ".join(f"{axis} {size}" for axis, size in self.degrees)
            have = " x ".join(f"{axis} {size}" for axis, size in found.items())
            raise ValueError(
                f"{owner} was sharded by `gtp_jax.shard` over {want}, and "
                f"{f'the mesh in scope is {have}' if have else 'no mesh is in scope'}. Use the model under `with "
                "jax.set_mesh(mesh):`, with the mesh for which it was sharded. To use another mesh, build a new "
                "model, shard it under that mesh, and restore its weights from a checkpoint."
            )

    def of_slice(self, shape: tuple[int, ...], owner: str = "a weight") -> Placement:
        """Returns the placement of an array of this shape: the whole array, or a slice without the first dimension, as
        inside a scan or a vmap over stacked weights.

        Args:
            shape: the shape of the array.
            owner: how the message names the weight.

        Raises:
            ValueError: if the shape has neither as many dimensions as the weight nor one fewer, or if it has one fewer
                and the weight's first dimension is sharded.
        """
        if len(shape) == self.ndim:
            return self
        if len(shape) != self.ndim - 1 or self.axes(0):
            raise ValueError(
                f"{owner} has {self.ndim} dimensions, and `gtp_jax.shard` stores it as {self.stored}, but its variable "
                f"holds an array of shape {shape}. At most one scan or vmap may run over a weight, over its first "
                "dimension, and only if this dimension is not sharded; if it is, name another partition with `specs`. "
                "If the weight is to have another shape, build the model again with that shape, and shard the new "
                "model."
            )
        stored, used = (PartitionSpec(*tuple(spec)[1:]) for spec in (self.stored, self.used))
        padding = self.padding if self.padding.dim is None else Padding(self.padding.dim - 1, self.padding.size)
        return dataclasses.replace(self, stored=stored, used=used, shape=self.shape[1:], padding=padding)

    def check_padding(self, shape: Sequence[int], owner: str, *, of_shard: bool) -> None:
        """Checks the size of the padded dimension of an array, if there is one. It must be the size with which the
        weight was stored, because a gather cuts this dimension to its logical size.

        Args:
            shape: the shape of the array.
            owner: how the message names the weight or slice.
            of_shard: whether the array is a shard.

        Raises:
            ValueError: if the array has another size in the padded dimension.
        """
        dim = self.padding.dim
        if dim is not None and shape[dim] * (self.parts(dim) if of_shard else 1) != self.array_shape[dim]:
            raise ValueError(
                f"{owner} has the shape {self.shape}, and `gtp_jax.shard` stores it padded to {self.array_shape}, but "
                f"its variable holds {'a shard' if of_shard else 'an array'} of shape {tuple(shape)}. "
                f"{'Pass arrays into `shard_map` in the partitions in which they are stored. ' if of_shard else ''}"
                "Outside of `shard_map`, set an array of the weight's logical shape, which is the same on every mesh: "
                "`kernel.set_value(array)` pads it. If the weight is to have another shape, build the model again with "
                "that shape, and shard the new model."
            )


def placement_of(variable: Any) -> Placement | None:
    """Returns the placement of the array that a variable holds, which may be a slice of the stored weight. Returns
    `None` for a variable without a placement, for one that has only copied a placement (`Placement.kind`), and for
    anything that is not a variable.

    In local view, a weight is gathered over all its axes, tensor axes included: a stock layer's code does not sum over
    tensor ranks, so each rank must compute with the whole weight.

    Raises:
        ValueError: for the same reasons as `Placement.of_slice`, `Placement.check_padding` and `current_view`.
    """
    placement = variable.get_metadata().get("placement") if isinstance(variable, nnx.Variable) else None
    if placement is None or type(variable) is not placement.kind:
        return None
    in_global = current_view() == "global"
    placement = placement if in_global else dataclasses.replace(placement, used=PartitionSpec())
    shape = getattr(variable.get_raw_value(), "shape", None)
    if shape is None:
        return placement
    owner = f"the weight {'.'.join(path_of(variable))}"
    found = placement.of_slice(shape, owner)
    owner = owner if found is placement else f"a slice of {owner}"
    found.check_padding(shape, owner, of_shard=current_view() == "local")
    return found


def place(shape: Sequence[int], roles: Roles, used: PartitionSpec, *, can_pad: bool) -> Placement | None:
    """Returns the placement of a weight of this shape on the mesh in scope; `None` for a scalar.

    Divides the weight over the mesh axes of the roles `weights` and `optimizer` that have more than one rank, except
    those that `used` names. Takes the first of these ways that is possible:

    1. All axes shard one dimension.
    2. The axes of `weights` shard one dimension, and those of `optimizer` another.
    3. All axes shard one dimension, which is padded. This requires `can_pad` and `even_shares`.
    4. Some of the axes shard one dimension; `_fewer` says which are tried first.

    If none is possible, the weight is stored as `used`. It has a placement nevertheless, so that a recipe can quantize
    it as on a larger mesh.

    Args:
        shape: the logical shape of the weight.
        roles: the roles of the mesh axes.
        used: the partition of the gathered array. It names only axes over which the weight is not gathered.
        can_pad: whether the weight may be padded.
    """
    shape, taken = tuple(shape), axes_of(used)
    weights = _above_one(axis for axis in roles.weights if axis not in taken)
    further = _above_one(axis for axis in roles.over_optimizer if axis not in taken)
    all_axes = (*further, *weights)
    for chosen in ((all_axes,), (weights, further)):
        if (stored := _divided(shape, used, chosen)) is not None:
            return placed(stored, used, shape)
    if can_pad and shares_are_even() and (padding := _padding(shape, used, degrees(all_axes))).dim is not None:
        axes = axes_by_dim(used, len(shape))
        axes[padding.dim] = all_axes
        return placed(spec_by_dim(axes), used, shape, padding)
    for axes in _fewer(all_axes, weights):
        if (stored := _divided(shape, used, (axes,))) is not None:
            return placed(stored, used, shape)
    return None


def placed(
    stored: PartitionSpec, used: PartitionSpec, shape: tuple[int, ...], padding: Padding = UNPADDED
) -> Placement:
    """Returns a placement with these partitions on the mesh in scope."""
    axes = [axis for axis in jax.sharding.get_abstract_mesh().axis_names if axis in axes_of(stored)]
    return Placement(stored, used, tuple((axis, degree(axis)) for axis in axes), shape, padding)


def _padding(shape: tuple[int, ...], used: PartitionSpec, ranks: int) -> Padding:
    """Returns the padding that makes one dimension of a weight divisible by this many ranks; `UNPADDED` if axes of
    `used` divide every dimension of more than one element.

    Prefers a dimension whose shards are also shards of a matrix (`features_in`). Pads such a dimension so that shards
    consist of whole blocks, or, if that adds too much (`choose_padding`), only so that they are equal. If that is not
    possible or adds too much, pads the dimension in which equal shards add least.
    """
    inputs = features_in(shape)
    free = [dim for dim, axes in enumerate(axes_by_dim(used, len(shape))) if not axes and shape[dim] > 1]
    ends = {inputs: (len(shape), BLOCK_ROWS), 0: (inputs, BLOCK)}
    starts = {dim: block // math.gcd(block, math.prod(shape[dim + 1 : end])) for dim, (end, block) in ends.items()}
    blocks = [Target(dim, ranks * own) for dim, own in starts.items() if dim in free]
    equal = [Target(dim, ranks) for dim in sorted(free, key=lambda dim: dim not in starts)]
    preferred = [*blocks, *(target for target in equal if target.dim in starts)]
    return choose_padding([shape], preferred, equal)[1][0]


def features_in(shape: Sequence[int]) -> int:
    """Returns how many leading dimensions of a weight are joined into the input features of its matrix. The others are
    joined into the output features.

    If the last dimension is longer than the first, all dimensions but the last are joined. Otherwise, as in a
    projection to heads, the first dimension alone forms the input features. The decision does not depend on the mesh.
    """
    return len(shape) - 1 if shape and shape[-1] > shape[0] else 1


def _divided(shape: tuple[int, ...], used: PartitionSpec, groups: Sequence[tuple[str, ...]]) -> PartitionSpec | None:
    """Returns `used` with each group of axes added to a dimension that the group divides evenly; `None` if a group
    divides no dimension. Prefers dimensions that no axis divides yet, then those whose shards are also shards of a
    matrix (`features_in`), then those with the longest shards."""
    divided = axes_by_dim(used, len(shape))
    for axes in groups:
        local = [size // degrees(own) for size, own in zip(shape, divided, strict=True)]
        dims = [dim for dim, size in enumerate(local) if size % degrees(axes) == 0]
        if not dims:
            return None
        starts = (0, features_in(shape))
        dim = max(dims, key=lambda dim: (not divided[dim], dim in starts, local[dim], -dim))  # unsharded ones first
        divided[dim] = (*divided[dim], *axes)
    return spec_by_dim(divided)


def _fewer(axes: tuple[str, ...], weights: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Returns all subsets of `axes`, sorted by their number of ranks, largest first. Of two subsets with equally many
    ranks, the one with more axes of `weights` comes first."""
    some = [chosen for count in range(len(axes) + 1) for chosen in itertools.combinations(axes, count)]
    return sorted(some, key=lambda chosen: (-degrees(chosen), -len(set(chosen) & set(weights))))


def _above_one(axes: Any) -> tuple[str, ...]:
    names = jax.sharding.get_abstract_mesh().axis_names
    return tuple(axis for axis in axes if axis in names and degree(axis) > 1)


def shards_of(placement: Placement) -> int:
    """Returns the number of distinct shards of a weight."""
    return math.prod(size for _, size in placement.degrees)
