"""Quantizes shards in tiles that shards may cut, and gathers their codes. Called inside a `shard_map`.

[Note: cut tiles]
A tile of 128 x 128 elements may lie in the shards of several ranks. Each rank finds the largest magnitude in its part
of every tile. One all-reduce per step takes the maxima over ranks, for all tiles of all weights together. Every rank
then knows the scales of all tiles that it gathers, so none are sent, and rounds its part as if it had the whole tile:
the codes are the same on every mesh, and equal those of one device. Ranks that have different experts, or different
parts of a kernel over tp, lay their maxima side by side in the vector that is reduced, so that no maximum is taken over
tiles of several of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Int32

from ..collectives import all_gather
from ..formats import FP8_BLOCKS_1D, QuantizedArray, Tiled
from ..layout import UNDIVIDED, Layout
from ..mesh import degrees
from ..ops import block_tops, encode_elements, inverses, power_of_two_scales, quantizable, values_of
from ._blocks import tensor_cuts
from ._fused import Shards, bytes_of, fuse, fuse_kernels, in_order, own_experts, whole_kernels
from ._optimizer_axes import gather_stored, is_divided
from ._wire import FusedWeights, Wire
from ._wire_spec import ModulePath, WireSpec


@functools.partial(jax.tree_util.register_dataclass, data_fields=("codes", "scales"), meta_fields=("members", "format"))
@dataclasses.dataclass(frozen=True)
class Tiles(Wire):
    """The codes of this rank's part of one fused weight, and the scales of the whole, which are not sent.

    Attributes:
        codes: uint8 `(*stack, *experts, rows of kernel 0 | rows of kernel 1 | ..., cols)`.
        scales: the inverse scales, float32 `(*stack, *experts, tiles of kernel 0 | tiles of kernel 1 | ..., tiles
            across)`; one rank's tiles of all kernels after another's where the gathered codes are multiplied in that
            order.
        members: the name of the fused weight.
        format: the format of the codes.
    """

    codes: jax.Array
    scales: jax.Array
    members: tuple[ModulePath, ...]
    format: Tiled

    def gather(self, groups: Mapping[ModulePath, WireSpec]) -> FusedWeights:
        """Returns the codes of the fused weight, with rows in the order of `WireSpec.order`; its values if products
        multiply values."""
        group = groups[self.members[0]]
        layouts, ranks = group.layouts, group.ranks
        parts = self.codes[None] if ranks == 1 else all_gather(self.codes[None], layouts[0].axes, dim=0)
        if not group.as_codes:
            return {self.members[0]: _values(fuse(parts, layouts), self.scales, group)}
        if group.order is None:
            codes = fuse(parts, layouts)
        else:
            codes = fuse_kernels(whole_kernels(parts, layouts), layouts)
        scales = own_experts(self.scales, layouts[0]) if group.has_experts else self.scales
        form = self.format.format
        return {self.members[0]: QuantizedArray(codes, scales, None, form, (codes.shape[-2], codes.shape[-1]))}


class _Part(NamedTuple):
    """What this rank stores of a kernel, with its place in the gathered matrix.

    Attributes:
        values: `(*stack, *experts, rows, cols)`.
        tiles: the numbers of tiles of the gathered matrix, down and across.
        runs: the lengths, down and across, of the runs into which the values are cut. Each run lies in one tile.
        places: for each dimension, the index of each run's tile.
    """

    values: jax.Array
    tiles: tuple[int, int]
    runs: tuple[int, int]
    places: tuple[Int32[jax.Array, " runs"], Int32[jax.Array, " runs"]]


def tile_all(
    bundles: Sequence[tuple[Mapping[ModulePath, Shards], Mapping[ModulePath, WireSpec]]],
) -> list[Tiles]:
    """Quantizes shards; see [Note: cut tiles].

    Args:
        bundles: for each wire, the shards of one fused weight, or the parts of them that this rank stores, and its
            group, by name.
    """
    weights = [(name, own, groups[name]) for shards, groups in bundles for name, own in shards.items()]
    kernels = kernels_in_tiles([(own, group) for _, own, group in weights])
    return [tiles_of(one, group, name) for one, (name, _, group) in zip(kernels, weights, strict=True)]


def kernels_in_tiles(weights: Sequence[tuple[Shards, WireSpec]]) -> list[tuple[QuantizedArray, ...]]:
    """Quantizes the kernels of fused weights; see [Note: cut tiles].

    Args:
        weights: the shards of each weight, or the parts of them that this rank stores, with or without the leading
            dimension of a stack, and its group.

    Returns:
        The codes of this rank's shards, `(*stack, *experts, rows, cols)`, with the scales of the whole kernels.
    """
    kernels = [
        (_part(shard, layout, group), layout)
        for own, group in weights
        for shard, layout in zip(own, group.layouts, strict=True)
    ]
    tops = [_tops(part) for part, _ in kernels]
    axes = {axis for _, layout in kernels for axis in (*layout.axes, *layout.optimizer.axes)}
    names = tuple(axis for axis in reversed(jax.sharding.get_abstract_mesh().axis_names) if axis in axes)
    if degrees(names) > 1 and tops:
        tops = _over_ranks(tops, [_own_axes(layout, names) for _, layout in kernels], names)
    scales = [power_of_two_scales(one) for one in tops]
    codes = [_codes(part, own) for (part, _), own in zip(kernels, scales, strict=True)]
    left = iter(zip(codes, scales, strict=True))
    return [tuple(_joined(*next(left), layout, group) for layout in group.layouts) for _, group in weights]


def _joined(codes: jax.Array, scales: jax.Array, layout: Layout, group: WireSpec) -> QuantizedArray:
    """Returns the codes of a shard, joined from the parts that ranks store, given the bits of the scales."""
    assert isinstance(group.wire, Tiled)
    dim = _dim_of_rows(layout)
    (shard,) = gather_stored((jnp.moveaxis(codes, -2, dim),), [layout])
    matrix = layout.matrix_of(layout.shape)
    return QuantizedArray(jnp.moveaxis(shard, dim, -2), inverses(scales), None, group.wire.format, matrix)


def tiles_of(kernels: Sequence[QuantizedArray], group: WireSpec, name: ModulePath) -> Tiles:
    """Returns what this rank sends of a fused weight, made from its kernels as `kernels_in_tiles` returns them."""
    assert isinstance(group.wire, Tiled)
    grids = [one.scales for one in kernels if one.scales is not None]
    part, grid = (jnp.concatenate(own, axis=-2) for own in ([one.codes for one in kernels], grids))
    if group.as_codes and group.order is None and group.ranks > 1 and len(grids) > 1 and in_order(group.layouts):
        grid = _by_rank(grid, [one.shape[-2] for one in grids], group.ranks)
    return Tiles(part, grid, (name,), group.wire)


def tiled_bytes(group: WireSpec) -> int:
    """Returns the number of bytes of one layer's gathered weight on the wire: one per element."""
    return bytes_of(group.layouts, 1)


def _part(x: jax.Array, layout: Layout, group: WireSpec) -> _Part:
    assert isinstance(group.wire, Tiled)
    optimizer = layout.optimizer if is_divided(x, layout) else UNDIVIDED
    values = quantizable(jnp.moveaxis(x, _dim_of_rows(layout), -2))
    runs, places, tiles = [], [], []
    block = group.wire.format.run
    for dim, size, side, whole in zip(
        (layout.rows, layout.cols), values.shape[-2:], block, layout.matrix_of(layout.whole_shape), strict=True
    ):
        start, length = 0, size
        for one in (optimizer, layout.gather):  # from the innermost division outward
            if one.dim == dim and one.ranks > 1:
                start = start + lax.axis_index(one.axes) * length
                length *= one.ranks
        run = side if size == whole else math.gcd(size, side)
        tiles.append(-(-whole // side))
        runs.append(run)
        places.append((start + jnp.arange(-(-size // run), dtype=jnp.int32) * run) // side)
    return _Part(values, (tiles[0], tiles[1]), (runs[0], runs[1]), (places[0], places[1]))


def _tops(part: _Part) -> jax.Array:
    """Returns the bits of the largest magnitude of this rank's part of each tile, `(*stack, *experts, tiles down, tiles
    across)`; 0 for other tiles."""
    each = block_tops(part.values, part.runs)
    down, across = part.places
    whole = jnp.zeros((*each.shape[:-2], *part.tiles), each.dtype)
    return whole.at[..., down[:, None], across[None]].max(each)


def _over_ranks(
    tops: Sequence[jax.Array], own_axes: Sequence[tuple[str, ...]], names: tuple[str, ...]
) -> list[jax.Array]:
    """Returns the maxima of bits over ranks; see [Note: cut tiles].

    Args:
        tops: the bits of each kernel, 0 where this rank has no part of a tile.
        own_axes: for each kernel, those of the axes whose ranks have different tiles.
        names: the axes.
    """
    parts = []
    for top, own in zip(tops, own_axes, strict=True):
        flat = jnp.ravel(top)
        if own:
            flat = jnp.ravel(jnp.zeros((degrees(own), flat.size), flat.dtype).at[lax.axis_index(own)].set(flat))
        parts.append(flat)
    vector = lax.pmax(jnp.concatenate(parts), names)
    ends = np.cumsum([one.size for one in parts])
    found = []
    for whole, top, own in zip(jnp.split(vector, ends[:-1]), tops, own_axes, strict=True):
        mine = jnp.reshape(whole, (degrees(own), -1))[lax.axis_index(own)] if own else whole
        found.append(jnp.reshape(mine, top.shape))
    return found


def _own_axes(layout: Layout, names: Sequence[str]) -> tuple[str, ...]:
    """Returns those of some axes whose ranks have different tiles of a kernel, instead of parts of the same tiles."""
    return tuple(axis for axis in (*layout.experts.axes, *layout.tensor.axes) if axis in names)


def _dim_of_rows(layout: Layout) -> int:
    """Returns the dimension of rows in stored order, counted from the last."""
    return layout.rows - len(layout.shape)


def _values(codes: jax.Array, grid: jax.Array, group: WireSpec) -> jax.Array:
    """Returns the values of a fused weight, in its dtype.

    Args:
        codes: the codes of the fused weight, `(*fused, rows, cols)`.
        grid: the inverse scales, `(*experts, tiles of kernel 0 | tiles of kernel 1 | ..., tiles across)`.
        group: the decisions about the weight.
    """
    assert isinstance(group.wire, Tiled)
    layouts, side = group.layouts, group.wire.format.run[0]
    rows = [layout.matrix_of(layout.whole_shape)[0] for layout in layouts]
    ends = np.cumsum([-(-one // side) for one in rows])
    kernels = [
        jnp.repeat(own, side, axis=-2)[..., :size, :]
        for own, size in zip(jnp.split(grid, ends[:-1], axis=-2), rows, strict=True)
    ]
    if in_order(layouts) and (group.has_experts or len(kernels) > 1):  # as `fuse` leaves the codes
        parts = [jnp.reshape(one, (*one.shape[:-2], group.ranks, -1, one.shape[-1])) for one in kernels]
        scales = jnp.moveaxis(jnp.concatenate(parts, axis=-2), -3, 0)
    else:
        scales = fuse_kernels(kernels, layouts)
    # repeated for every row of its tile, a tile's scale is the scale of a run of 128 elements of that row
    scales = jnp.reshape(scales, (*codes.shape[:-1], grid.shape[-1]))
    runs = QuantizedArray(codes, scales, None, FP8_BLOCKS_1D, (codes.shape[-2], codes.shape[-1]))
    return values_of(runs, group.dtype)


def _codes(part: _Part, scales: jax.Array) -> jax.Array:
    """Returns the codes of this rank's part, given the bits of all tiles' scales."""
    down, across = part.places
    each = lax.optimization_barrier(scales[..., down[:, None], across[None]])
    rows, cols = part.values.shape[-2:]
    whole = jnp.repeat(jnp.repeat(each, part.runs[0], axis=-2), part.runs[1], axis=-1)
    return encode_elements(part.values, whole[..., :rows, :cols])


def _by_rank(grid: jax.Array, tiles: Sequence[int], ranks: int) -> jax.Array:
    """Reorders rows of tiles from kernel by kernel to rank by rank, each rank with its tiles of every kernel."""
    kernels = jnp.split(grid, np.cumsum(tiles)[:-1], axis=-2)
    lead, across = grid.shape[:-2], grid.shape[-1]
    parts = jnp.concatenate([jnp.reshape(one, (*lead, ranks, -1, across)) for one in kernels], axis=-2)
    return jnp.reshape(parts, grid.shape)


def check_tiles(group: WireSpec, path: ModulePath) -> None:
    """Checks that tensor ranks divide a weight evenly into whole tiles, unless each has experts of its own.

    Args:
        group: the decisions about the weight.
        path: the path of its module.

    Raises:
        ValueError: if tensor ranks would cut tiles, or if they divide the weight unevenly. The message names the module
            and the remedy.
    """
    if not isinstance(group.wire, Tiled):
        return
    form = group.wire.format
    name = ".".join(map(str, path)) or "a module"
    exclude = f"Name {name} in the recipe's `exclude`"
    for one in group.layouts:
        if one.split is None or one.tensor_degree == 1 or one.splits_experts:
            continue
        if not one.split.even:
            parts = f"uneven parts of {one.split.counts} elements, which {form.name} does not support"
        elif tensor_cuts(one, form):
            own, side = one.split.width, form.run[0 if one.split_dim == one.rows else 1]
            parts = f"parts of {own}, which are not whole tiles of {form.name} ({side} elements)"
        else:
            continue
        raise ValueError(
            f"the tensor axis divides dimension {one.split_dim} of the weight of shape {one.shape} of {name} into "
            f"{parts}. {exclude}, or choose another tensor degree."
        )
