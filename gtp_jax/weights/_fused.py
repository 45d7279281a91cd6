"""Gathers shards to a fused weight, and reduces its gradient to shards. Called inside a `shard_map`.

[Note: the fused weight]
A layer may hold several kernels that multiply the same input (query, key, value; gate and up). Their shards are
concatenated and sent in one gather. If shards are whole rows, in multiples of a block, the gathered weight contains the
rows of all kernels from rank 0, then those from rank 1, and so on:

    (ranks, rows of kernel 0 | rows of kernel 1 | ..., features_in)

with the first two dimensions joined. One matmul multiplies it as it is, without a copy. `split_features` then splits
the activation into the kernels' outputs. In a layer of experts, each rank's part contains the kernels of one expert
after another, and the fused weight is `(ranks, experts, rows of kernel 0 | rows of kernel 1 | ..., features_in)`.

Other shards are reordered first, by one copy of the weight: columns; weights of which each tensor rank takes a part;
and, of several kernels or of experts, rows that are padded or not a multiple of a block. The result has the same form,
with 1 for `ranks`.

[Note: padded shards]
Padding lies at the end of one dimension of the stored array (`layout.Padding`). The gathered weight is cut, never the
activations. If a matrix by itself is sharded by rows, the padding is the end of the gathered array, and XLA for GPUs
makes the matmul read the rest in place; a chain, which gathers ahead, therefore cuts it after its barriers
(`WeightGroup.cut_late`). Elsewhere the cut is part of the copy that reorders. Backward pads the gradient once, with
zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Shaped

from ..collectives import all_gather, moved_in_bits, reduce_scatter
from ..layout import BLOCK, Layout
from ..ops import row_major
from ._optimizer_axes import gather_stored

Shards = tuple[jax.Array, ...]


def gather_weight(
    shards: Shards, layouts: Sequence[Layout], dtype: jax.typing.DTypeLike
) -> Float[jax.Array, "*fused rows features_in"]:
    """Returns the fused weight of a layer, gathered from all ranks' shards.

    Args:
        shards: one array per kernel, of its layout's `shard_shape`, or of its `stored_shape`, which is first joined to
            a shard.
        layouts: the kernels' layouts; see `layouts_of_kernels`.
        dtype: the dtype on the wire and in the matmul.

    Returns:
        The fused weight, `(rows, features_in)`; for experts, `(ranks, experts, rows, features_in)`; see
        [Note: the fused weight]. With one rank and whole shards, no collective is issued.
    """
    return gather_part(part_of(shards, layouts, dtype), layouts)


def part_of(shards: Shards, layouts: Sequence[Layout], dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns this rank's part of a fused weight in the form that is sent, `(*stack, *experts, rows of kernel 0 | rows
    of kernel 1 | ..., cols)`. Arguments are those of `gather_weight`, with or without the leading dimension of a
    stack."""
    shards = gather_stored(shards, layouts, dtype)
    rows = [jnp.moveaxis(s, layout.rows - len(layout.shape), -2) for s, layout in zip(shards, layouts, strict=True)]
    return rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=-2)


def gather_part(part: jax.Array, layouts: Sequence[Layout]) -> Float[jax.Array, "*fused rows features_in"]:
    """Returns the fused weight, gathered from the parts that `part_of` makes on each rank."""
    ranks, axes = layouts[0].ranks, layouts[0].axes
    flat = jnp.reshape(part, (-1, part.shape[-1]))
    if ranks > 1:
        flat = moved_in_bits(lambda x: all_gather(x, axes, dim=0), flat)
    return fuse(jnp.reshape(flat, (ranks, *part.shape)), layouts)


def fuse(parts: jax.Array, layouts: Sequence[Layout]) -> jax.Array:
    """Returns the fused weight, made from all ranks' parts.

    Args:
        parts: the parts of all ranks, `(ranks, *experts, rows of kernel 0 | rows of kernel 1 | ..., cols)`.
        layouts: the kernels' layouts.
    """
    if not in_order(layouts):
        return fuse_kernels(whole_kernels(parts, layouts), layouts)
    if parts.ndim > 3:
        return parts
    return _cut(jnp.reshape(parts, (-1, parts.shape[-1])), layouts[0])


def fuse_kernels(kernels: Sequence[jax.Array], layouts: Sequence[Layout]) -> jax.Array:
    """Returns the fused weight: this tensor rank's parts of whole kernels, `(*experts, rows, cols)`, concatenated."""
    parts = [_take(kernel, layout) for kernel, layout in zip(kernels, layouts, strict=True)]
    fused = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-2)
    return fused[None] if fused.ndim > 2 else fused


def cut_fused(weight: jax.Array, layouts: Sequence[Layout]) -> jax.Array:
    """Cuts the padding of the shards off the fused weight of one matrix, if the weight still has it."""
    return _cut(weight, layouts[0])


def unfuse(gradient: jax.Array, layouts: Sequence[Layout]) -> jax.Array:
    """Splits a fused weight's gradient into those of all ranks' parts: the transpose of `fuse`."""
    first = layouts[0]
    if in_order(layouts):
        return jnp.reshape(_padded(gradient, first), (first.ranks, *_lead(first), -1, gradient.shape[-1]))
    use = [layout.matrix_of(layout.use_shape) for layout in layouts]
    whole = jnp.reshape(gradient, (*first.use_shape[:-2], sum(rows for rows, _ in use), use[0][1]))
    pieces = jnp.split(whole, np.cumsum([rows for rows, _ in use])[:-1], axis=-2)
    return _for_each_rank([_place(piece, layout) for piece, layout in zip(pieces, layouts, strict=True)], layouts)


def in_order(layouts: Sequence[Layout]) -> bool:
    """Returns whether the fused weight can be multiplied in the order in which a gather concatenates ranks' parts."""
    first = layouts[0]
    if first.takes_part or not (first.by_rows or first.ranks == 1):
        return False
    one_matrix = len(layouts) == 1 and len(first.shape) == 2
    whole_blocks = all(one.shard_shape[one.rows] % BLOCK == 0 and not one.shard_padding.size for one in layouts)
    return one_matrix or first.ranks == 1 or whole_blocks


def fused_parts(layouts: Sequence[Layout]) -> int:
    """Returns the number of parts of the fused weight, each with the same share of every kernel's rows."""
    return layouts[0].ranks if in_order(layouts) else 1


def use_rows(layouts: Sequence[Layout]) -> tuple[int, ...]:
    """Returns the number of rows of each kernel in the fused weight."""
    return tuple(layout.use_shape[layout.rows] for layout in layouts)


def reduce_gradient(
    gradient: Float[jax.Array, "*fused rows features_in"], layouts: Sequence[Layout], dtype: jax.typing.DTypeLike
) -> Float[jax.Array, "_ _"]:
    """Sums a fused weight's gradient over its ranks and returns this rank's part, which `as_shards` splits into shards.
    The two together are the transpose of `gather_weight` for whole shards.

    Gradients of padding are dropped.

    Args:
        gradient: this rank's gradient, of the fused weight's shape.
        layouts: the kernels' layouts.
        dtype: the dtype on the wire and of the sum. With bfloat16, every partial sum is rounded to it, whereas
            `exchange_gradients` rounds only each rank's gradient. With one rank, nothing is sent or rounded.
    """
    alone = layouts[0].ranks == 1
    parts = unfuse(gradient if alone else gradient.astype(dtype), layouts)
    part = jnp.reshape(parts, (-1, parts.shape[-1]))
    return part if alone else reduce_scatter(part, layouts[0].axes, dim=0)


def as_shards(part: jax.Array, layouts: Sequence[Layout], out: Sequence[jax.typing.DTypeLike]) -> Shards:
    """Splits this rank's part of a fused weight into its kernels' shards, in the dtypes `out`."""
    part = jnp.reshape(part, (*_lead(layouts[0]), -1, part.shape[-1]))
    ends = np.cumsum([layout.shard_shape[layout.rows] for layout in layouts])
    pieces = jnp.split(part, ends[:-1], axis=-2)
    return tuple(
        _as_shard(piece, layout).astype(kind) for piece, layout, kind in zip(pieces, layouts, out, strict=True)
    )


def _as_shard(piece: jax.Array, layout: Layout) -> jax.Array:
    """Returns a shard with its dimensions in stored order, from `(*experts, rows, cols)`."""
    if layout.rows == len(layout.shape) - 2:
        return piece
    # otherwise XLA keeps the wire's order, and transposes parameter and moments inside the optimizer's kernel
    return row_major(jnp.moveaxis(piece, -2, layout.rows))


def split_features(
    y: Float[jax.Array, "*tokens rows"], layouts: Sequence[Layout]
) -> tuple[Float[jax.Array, "*tokens _"], ...]:
    """Splits the product with a fused weight into the kernels' outputs, each `(..., rows)`."""
    if len(layouts) == 1:
        return (y,)
    ranks, sizes = fused_parts(layouts), use_rows(layouts)
    by_rank = jnp.reshape(y, (*y.shape[:-1], ranks, -1))
    pieces = jnp.split(by_rank, np.cumsum([size // ranks for size in sizes])[:-1], axis=-1)
    return tuple(jnp.reshape(piece, (*y.shape[:-1], size)) for piece, size in zip(pieces, sizes, strict=True))


def _lead(layout: Layout) -> tuple[int, ...]:
    """Returns the sizes of a shard's leading dimensions, which are those of experts."""
    return layout.shard_shape[:-2]


def whole_kernels(parts: jax.Array, layouts: Sequence[Layout]) -> list[jax.Array]:
    """Returns whole kernels, each `(*lead, rows, cols)`, made from all ranks' parts.

    Args:
        parts: the parts of all ranks, `(ranks, *lead, rows of kernel 0 | rows of kernel 1 | ..., cols)`.
        layouts: the kernels' layouts.
    """
    ends = np.cumsum([layout.matrix_of(layout.shard_shape)[0] for layout in layouts])
    kernels = []
    for piece, layout in zip(jnp.split(parts, ends[:-1], axis=-2), layouts, strict=True):
        ahead = -3 if layout.by_rows else -2  # the place before the dimension that the ranks divide
        moved = jnp.moveaxis(piece, 0, ahead)
        rows, cols = layout.matrix_of(layout.joined_shape)
        kernels.append(_cut(jnp.reshape(moved, (*parts.shape[1:-2], rows, cols)), layout))
    return kernels


def _for_each_rank(kernels: Sequence[jax.Array], layouts: Sequence[Layout]) -> jax.Array:
    """Splits whole kernels into all ranks' parts: the transpose of `whole_kernels`."""
    parts = []
    for kernel, layout in zip(kernels, layouts, strict=True):
        rows, cols = layout.matrix_of(layout.shard_shape)
        kernel = _padded(kernel, layout)
        if layout.by_rows:
            parted = jnp.reshape(kernel, (*_lead(layout), layout.ranks, rows, cols))
            parts.append(jnp.moveaxis(parted, -3, 0))
        else:
            parted = jnp.reshape(kernel, (*_lead(layout), rows, layout.ranks, cols))
            parts.append(jnp.moveaxis(parted, -2, 0))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-2)


def _cut(kernel: jax.Array, layout: Layout) -> jax.Array:
    """Returns a whole kernel, `(*lead, rows, cols)`, without the padding of the shards."""
    if not layout.shard_padding.size:
        return kernel
    rows, cols = layout.matrix_of(layout.whole_shape)
    return kernel[..., :rows, :cols]


def _padded(kernel: jax.Array, layout: Layout) -> jax.Array:
    """Returns a whole kernel, `(*lead, rows, cols)`, with the padding of the shards: the transpose of `_cut`."""
    if not layout.shard_padding.size:
        return kernel
    more = [size - own for size, own in zip(layout.matrix_of(layout.joined_shape), kernel.shape[-2:], strict=True)]
    return jnp.pad(kernel, (*((0, 0),) * (kernel.ndim - 2), *((0, size) for size in more)))


def _take(kernel: jax.Array, layout: Layout) -> jax.Array:
    """Returns this tensor rank's part of a whole kernel `(*experts, rows, cols)`."""
    if not layout.takes_part or layout.split is None:
        return kernel
    return layout.split.take(kernel, _dim_of_split(layout))


def own_experts(values: Shaped[jax.Array, "experts ..."], layout: Layout) -> Shaped[jax.Array, "own ..."]:
    """Returns the values of this tensor rank's experts, with zeros as padding; all values unless
    tensor ranks take parts of the gathered experts."""
    if not layout.takes_part or not layout.splits_experts or layout.split is None:
        return values
    return layout.split.take(values, 0)


def _place(part: jax.Array, layout: Layout) -> jax.Array:
    """Returns the whole kernel with this tensor rank's part in place: the transpose of `_take`."""
    if not layout.takes_part or layout.split is None:
        return part
    return layout.split.place(part, _dim_of_split(layout))


def _dim_of_split(layout: Layout) -> int:
    """Returns the dimension that tensor ranks divide, in the order `(*experts, rows, cols)`."""
    if layout.splits_experts:
        assert layout.split_dim is not None
        return layout.split_dim
    return -2 if layout.split_dim == layout.rows else -1


def bytes_of(layouts: Sequence[Layout], itemsize: int) -> int:
    """Returns the number of bytes of all different shards of these weights."""
    return sum(layout.shards * math.prod(layout.shard_shape) * itemsize for layout in layouts)
