"""Decides where weights of any shape live on the mesh in scope."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import jax
from jax.sharding import PartitionSpec

from ..mesh import Roles, axes_by_dim, axes_of, degree, degrees, spec_by_dim
from ._choice import BLOCK, BLOCK_ROWS, axes_choices
from ._even_shares import shares_are_even, shares_may_be_even
from ._matrix import features_in
from ._pad_choice import Target, choose_padding
from ._placement import Placement
from ._storage import UNPADDED, Padding


def place(
    shape: Sequence[int], roles: Roles, used: PartitionSpec, *, can_pad: bool, of_layers: bool = False
) -> Placement | None:
    """Returns the placement of a weight of this shape on the mesh in scope; `None` for a scalar.

    Divides the weight over the mesh axes of the roles `weights` and `optimizer` that have more than one rank, except
    those that `used` names. Takes the first of these ways that is possible:

    1. All axes shard one dimension.
    2. The axes of `weights` shard one dimension, and those of `optimizer` another.
    3. All axes shard one dimension, which is padded. This requires `can_pad`. Outside of `even_shares`, only the
       placement that a `TrainState` uses (`Placement.even`) is padded.
    4. Some of the axes shard one dimension; `axes_choices` says which are tried first.

    If none is possible, the weight is stored as `used`. It has a placement nevertheless, so that a recipe can quantize
    it as on a larger mesh.

    Args:
        shape: the logical shape of the weight.
        roles: the roles of the mesh axes.
        used: the partition of the gathered array. It names only axes over which the weight is not gathered.
        can_pad: whether the weight may be padded.
        of_layers: whether the first of several dimensions may be that of layers, over which a loop runs. It is then not
            padded.
    """
    shape, taken = tuple(shape), axes_of(used)
    weights = _above_one(axis for axis in roles.weights if axis not in taken)
    further = _above_one(axis for axis in roles.over_optimizer if axis not in taken)
    all_axes = (*further, *weights)
    for chosen in ((all_axes,), (weights, further)):
        if (stored := _divided(shape, used, chosen)) is not None:
            return placed(stored, used, shape)
    even = None
    if (
        can_pad
        and shares_may_be_even()
        and (padding := _padding(shape, used, degrees(all_axes), of_layers=of_layers)).dim is not None
    ):
        divided = axes_by_dim(used, len(shape))
        divided[padding.dim] = all_axes
        even = placed(spec_by_dim(divided), used, shape, padding)
        if shares_are_even():
            return even
    for axes in axes_choices(all_axes, preferred=weights):
        if (stored := _divided(shape, used, (axes,))) is not None:
            return dataclasses.replace(placed(stored, used, shape), even=even)
    return None


def placed(
    stored: PartitionSpec, used: PartitionSpec, shape: tuple[int, ...], padding: Padding = UNPADDED
) -> Placement:
    """Returns a placement with these partitions on the mesh in scope."""
    axes = [axis for axis in jax.sharding.get_abstract_mesh().axis_names if axis in axes_of(stored)]
    return Placement(stored, used, tuple((axis, degree(axis)) for axis in axes), shape, padding)


def _padding(shape: tuple[int, ...], used: PartitionSpec, ranks: int, *, of_layers: bool) -> Padding:
    """Returns the padding that makes one dimension of a weight divisible by this many ranks; `UNPADDED` if axes of
    `used` divide every dimension of more than one element.

    Prefers a dimension whose shards are also shards of a matrix (`features_in`). Pads such a dimension so that shards
    consist of whole blocks, or, if that adds too much (`choose_padding`), only so that they are equal. If that is not
    possible or adds too much, pads the dimension in which equal shards add least.
    """
    inputs = features_in(shape)
    first = 1 if of_layers and len(shape) > 1 else 0
    divided = axes_by_dim(used, len(shape))
    free = [dim for dim, axes in enumerate(divided) if not axes and shape[dim] > 1 and dim >= first]
    ends = {inputs: (len(shape), BLOCK_ROWS), 0: (inputs, BLOCK)}
    starts = {dim: block // math.gcd(block, math.prod(shape[dim + 1 : end])) for dim, (end, block) in ends.items()}
    blocks = [Target(dim, ranks * own) for dim, own in starts.items() if dim in free]
    equal = [Target(dim, ranks) for dim in sorted(free, key=lambda dim: dim not in starts)]
    preferred = [*blocks, *(target for target in equal if target.dim in starts)]
    return choose_padding([shape], preferred, equal)[1][0]


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


def _above_one(axes: Iterable[str]) -> tuple[str, ...]:
    names = jax.sharding.get_abstract_mesh().axis_names
    return tuple(axis for axis in axes if axis in names and degree(axis) > 1)
