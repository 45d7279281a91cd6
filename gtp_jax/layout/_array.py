"""The layout of an array of any shape, viewed as a matrix whose rows the mesh axes shard."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..mesh import current_roles, degree, degrees
from ._choice import axes_choices, divided, warn_of_whole
from ._even_shares import shares_are_even, shares_may_be_even
from ._layout import Layout
from ._pad_choice import Target, choose_padding
from ._split import Split
from ._storage import UNPADDED, Padding


@dataclasses.dataclass(frozen=True)
class ArrayLayout:
    """The layout of a weight of any shape: an array for its users, and rows of a matrix on the wire.

    Attributes:
        shape: the logical shape.
        order: the dimensions of the array in the order in which `matrix` has them: first the dimension of the tensor
            axis, unless the other axes shard it too; then the dimension that the other axes shard, which becomes the
            rows; then the remaining dimensions, which are joined into columns.
        matrix: the layout of the array viewed as that matrix.
        even: the layout with padding that a `TrainState` gives the weight, if this one stores it whole over some axes
            (`even_shares`); otherwise `None`. Layouts are compared without it.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    matrix: Layout
    even: ArrayLayout | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def array_shape(self) -> tuple[int, ...]:
        """The shape of the stored array, padding included."""
        dim, more = self.matrix.padding
        return self.shape if dim is None else Padding(self.order[dim], more).added_to(self.shape)

    @property
    def tensor_dim(self) -> int | None:
        """The dimension that the tensor axis divides, or `None`."""
        return None if self.matrix.split_dim is None else self.order[self.matrix.split_dim]

    @property
    def spec(self) -> PartitionSpec:
        """The partition spec of the stored array."""
        entries: list[object] = [None] * len(self.shape)
        for dim, entry in zip(self.order, tuple(self.matrix.spec)[:-1], strict=False):
            entries[dim] = entry
        return PartitionSpec(*entries)

    @property
    def use_spec(self) -> PartitionSpec:
        """The partition spec of the gathered array in global view: over the tensor axis, if that divides it evenly."""
        split, dim = self.matrix.split, self.tensor_dim
        entries: list[object] = [None] * len(self.shape)
        if split is not None and dim is not None and not self.matrix.takes_part:
            entries[dim] = split.axis
        return PartitionSpec(*entries)

    @property
    def use_shape(self) -> tuple[int, ...]:
        """The shape of the array in use on a rank, padding included."""
        split = self.matrix.split
        return tuple(split.width if split and d == self.tensor_dim else size for d, size in enumerate(self.shape))

    def to_matrix(self, array: jax.Array) -> jax.Array:
        """Transposes and reshapes a whole array or a shard, possibly with a leading dimension of layers, to the
        dimensions of `matrix`."""
        ahead = array.ndim - len(self.shape)
        moved = jnp.transpose(array, (*range(ahead), *(ahead + dim for dim in self.order)))
        sizes, lead = moved.shape[ahead:], len(self.matrix.shape) - 1
        return jnp.reshape(moved, (*moved.shape[:ahead], *(sizes[:lead] or (1,)), math.prod(sizes[lead:])))

    def from_fused(self, weight: jax.Array) -> jax.Array:
        """Returns the array in use, from the fused weight that a gather returns; see [Note: the fused weight]."""
        if weight.ndim == 4:  # ordered by rank: (ranks, tensor dimension, rows, columns)
            weight = jnp.moveaxis(weight, 0, 1)
        lead = self.matrix.use_shape[:-1]
        rest = [self.shape[dim] for dim in self.order[len(lead) :]]
        moved = jnp.reshape(weight, (*lead, *rest)[: len(self.shape)])
        return jnp.transpose(moved, [self.order.index(dim) for dim in range(len(self.shape))])


def layout_of_array(shape: Sequence[int], *, tensor_dim: int | None = None) -> ArrayLayout:
    """Lays out an array of any shape on the mesh in scope.

    Shards the longest dimension other than `tensor_dim` that all ranks divide evenly; if there is none, `tensor_dim`.
    If no dimension can be divided, the array is gathered over fewer axes, with as many ranks as possible. Under
    `even_shares`, and in the layout that a `TrainState` uses (`ArrayLayout.even`), the stored array is padded instead,
    along the dimension where that adds least, which must not be one that the tensor axis shards. A warning is issued if
    the array stays whole nevertheless.

    Args:
        shape: the logical shape.
        tensor_dim: the dimension that the tensor axis divides, if any. Negative numbers count from the end.

    Raises:
        ValueError: if the array is empty, or does not have the dimension `tensor_dim`.
    """
    shape, roles = tuple(shape), current_roles()
    if 0 in shape:
        raise ValueError(f"a weight has shape {shape}; every dimension must be at least 1.")
    if tensor_dim is not None and not -len(shape) <= tensor_dim < len(shape):
        raise ValueError(
            f"`tensor_dim` of a weight of shape {shape} is {tensor_dim}; it must be one of its {len(shape)} "
            "dimensions, which the tensor axis then divides, or `None`."
        )
    split = None
    if tensor_dim is not None:
        tensor_dim %= len(shape)
        split = Split.in_blocks(shape[tensor_dim], 1, roles.tensor)
    even = split is None or split.even
    local = [size // degree(roles.tensor) if even and d == tensor_dim else size for d, size in enumerate(shape)]
    others = [dim for dim in range(len(shape)) if dim != tensor_dim]
    dims = [*sorted(others, key=lambda dim: (-shape[dim], -dim)), *([] if tensor_dim is None else [tensor_dim])]
    choices = axes_choices(roles.weights, None if even else roles.tensor)

    def laid_out(*, pad: bool) -> ArrayLayout:
        for chosen in choices:
            ranks = degrees(chosen)
            rows, more = next((dim for dim in dims if local[dim] % ranks == 0), None), 0
            if rows is None and pad and chosen == choices[0]:
                targets = [Target(dim, ranks) for dim in dims if local[dim] == shape[dim] > 1]  # not over tensor
                rows, (padding,) = choose_padding([shape], [], targets)
                more = padding.size
            if rows is not None:
                return _laid_out(shape, rows, more, tensor_dim, split, chosen, even=even)
        return ArrayLayout(shape, (), Layout((1, 1), rows=0, roles=roles))  # the layout of a scalar

    found = laid_out(pad=shares_may_be_even())
    if shape:
        warn_of_whole(shape, [axis for axis in roles.weights if axis not in found.matrix.gather.axes])
    if shares_are_even() or not found.matrix.padding.size:
        return found
    return dataclasses.replace(laid_out(pad=False), even=found)


def _laid_out(
    shape: tuple[int, ...],
    rows: int,
    more: int,
    tensor_dim: int | None,
    split: Split | None,
    axes: tuple[str, ...],
    *,
    even: bool,
) -> ArrayLayout:
    ahead = [tensor_dim] if tensor_dim is not None and tensor_dim != rows else []
    rest = [dim for dim in range(len(shape)) if dim not in (*ahead, rows)]
    tensor = (split.axis,) if split is not None and split.axis is not None and even else ()
    matrix = Layout(
        shape=(*(shape[dim] for dim in ahead), shape[rows], math.prod(shape[dim] for dim in rest)),
        gather=divided(len(ahead), axes),
        tensor=divided(0, tensor),
        padding=Padding(len(ahead), more) if more else UNPADDED,
        rows=len(ahead),
        split_dim=None if split is None else 0,
        split=split,
        roles=current_roles(),
    )
    return ArrayLayout(shape, (*ahead, rows, *rest), matrix)
