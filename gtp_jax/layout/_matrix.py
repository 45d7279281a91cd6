"""Treats weights of two or more dimensions as matrices.

[Note: seen as a matrix]
A weight of two or more dimensions is seen as a matrix `(input features, output features)`, like the kernel of a dense
layer, unless its sharding prevents this. Its leading dimensions, whose number `features_in` returns, are joined into
the input features, and the others into the output features. If the blocks of a format are not square, they run along
the input features.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ._layout import Layout
from ._placement import Placement
from ._split import Split
from ._storage import UNDIVIDED, UNPADDED, Division, Padding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matrix:
    """How a weight is seen as a matrix.

    Attributes:
        inputs: the number of leading dimensions that are joined into the input features; see [Note: seen as a matrix].
        layout: the layout of the matrix `(input features, output features)`. Its rows, in the sense of `Layout.rows`,
            are the output features, unless `hook._codes` has exchanged rows and columns of a quantized weight.
    """

    inputs: int
    layout: Layout

    def to_matrix(self, array: jax.Array) -> jax.Array:
        """Reshapes the weight, its gradient, or a shard of either to the two dimensions of the matrix."""
        return jnp.reshape(array, (math.prod(array.shape[: self.inputs]), math.prod(array.shape[self.inputs :])))

    @property
    def used(self) -> PartitionSpec:
        """The partition of the gathered matrix."""
        split = self.layout.split
        entries = [split.axis if split is not None and dim == self.layout.split_dim else None for dim in range(2)]
        return PartitionSpec(*entries)


def seen_as_matrix(shape: tuple[int, ...], placement: Placement) -> Matrix | str:
    """Returns how a weight of this logical shape is seen as a matrix, or, if that is impossible, the reason in
    words."""
    if len(shape) < 2:
        return "it is not a matrix"
    inputs = features_in(shape)
    # the dimensions of the weight that may be sharded, and the dimensions of the matrix into which they are joined
    starts = {0: 0, inputs: 1}
    sizes = math.prod(shape[:inputs]), math.prod(shape[inputs:])
    degrees = dict(placement.degrees)

    def divided(dim: int, axes: tuple[str, ...]) -> Division:
        return Division(starts[dim], axes, tuple(degrees[axis] for axis in axes))

    axes = {dim: (placement.used_axes(dim), placement.gathered_axes(dim)) for dim in range(len(shape))}
    inner = [dim for dim, (used, gathered) in axes.items() if (used or gathered) and dim not in starts]
    if inner:
        return f"dimension {inner[0]} is sharded, and its shards are not rows or columns of a matrix"
    tensor = [divided(dim, used) for dim, (used, _) in axes.items() if used]
    if len(tensor) > 1 or any(len(one.axes) > 1 for one in tensor):
        return "several axes still shard it after the gather"
    split = None
    if tensor:
        size = sizes[tensor[0].dim or 0]
        split = Split(size, 1, (size // tensor[0].ranks,) * tensor[0].ranks, tensor[0].axes[0])
    gathered = sorted((divided(dim, own) for dim, (_, own) in axes.items() if own), key=lambda one: -one.ranks)
    gather, optimizer, *_ = (*gathered, UNDIVIDED, UNDIVIDED)
    (tensor,) = tensor or [UNDIVIDED]
    padding = UNPADDED
    if placement.padding.dim is not None:  # the dimensions that are joined with this one are whole
        dim = placement.padding.dim
        padding = Padding(starts[dim], placement.padding.size * (sizes[starts[dim]] // shape[dim]))
    layout = Layout(sizes, gather, optimizer, tensor, padding=padding, rows=1, split_dim=tensor.dim, split=split)
    return Matrix(inputs=inputs, layout=layout)


def features_in(shape: Sequence[int]) -> int:
    """Returns how many leading dimensions of a weight are joined into the input features of its matrix. The others are
    joined into the output features.

    If the last dimension is longer than the first, all dimensions but the last are joined. Otherwise, as in a
    projection to heads, the first dimension alone forms the input features. The decision does not depend on the mesh.
    """
    return len(shape) - 1 if shape and shape[-1] > shape[0] else 1
