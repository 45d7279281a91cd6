"""Quantized slices to whole weights. Called inside a `shard_map`.

All kernels of one layer travel as one buffer of bytes, even those of several modules. What comes out lies as
`gather_weight` would leave it, see [Note: the fused weight], so that nothing behind the gather knows whether there was
a format.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import Format, PackPlan, Piece, QuantizedArray
from ..mesh import AXES, TP, Layout, degrees
from ..ops import multi_amax, pack, power_of_two_amax, quantizable, unpack
from ._weight import Slices, as_fused

# The layouts of each fused weight's kernels.
Fused = Sequence[Sequence[Layout]]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("buffer", "amax"), meta_fields=("format", "members", "gathered")
)
@dataclasses.dataclass(frozen=True)
class Packed:
    """This rank's slices of a layer's weights, or of a stack of layers', as they travel; or all ranks', once they have.

    Attributes:
        buffer: uint8 `(*stack, bytes)`; `(*stack, slices, bytes)` if gathered.
        amax: float32 `(*stack, kernels)`, over all slices; `None` if the format has none. It does not travel.
        format: of the codes.
        members: names of the fused weights in it, in order.
        gathered: whether all slices are here.
    """

    buffer: jax.Array
    amax: jax.Array | None
    format: Format
    members: tuple[Any, ...]
    gathered: bool = False


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Weights that are to travel in one buffer.

    Attributes:
        slices: by name of the fused weight, this rank's slices of its kernels, with the leading dimension of a stack or
            without.
        fused: the layouts of each one's kernels.
        format: of the codes.
        powers_of_two: whether a tensor's scale is rounded to one.
        one_scale: whether all kernels of a fused weight share one, so that its codes can be multiplied as they are.
    """

    slices: dict[Any, Slices]
    fused: Fused
    format: Format
    powers_of_two: bool = False
    one_scale: bool = False

    @property
    def kernels(self) -> list[jax.Array]:
        """All slices, in the order in which they travel: matrices, an expert's each by itself."""
        weights = zip(self.slices.values(), self.fused, strict=True)
        return [quantizable(x) for slices, layouts in weights for x in _matrices(slices, layouts)]

    @property
    def divided(self) -> np.ndarray:
        """Of every amax of the kernels, layer by layer of a stack, whether each tp rank has one of its own."""
        kinds = [one.divided for layouts in self.fused for _ in range(layouts[0].matrices) for one in layouts]
        return np.repeat(kinds, [1 if x.ndim == 2 else x.shape[0] for x in self.kernels])


def pack_all(bundles: Sequence[Bundle]) -> list[Packed]:
    """Quantizes slices: one amax kernel and one reduction of one vector for all bundles, one launch for each.

    The amax of a weight is taken over the axes that cut it, gtp and tp, and not over replicas, which agree already.
    """
    scaled = [x for bundle in bundles if bundle.format.has_amax for x in bundle.kernels]
    stacks = [x[None] if x.ndim == 2 else x for x in scaled]
    amaxes: list[jax.Array] = []
    if stacks:
        vector = _over_slices(multi_amax(stacks, stacked=True), [b for b in bundles if b.format.has_amax])
        ends = np.cumsum([x.shape[0] for x in stacks])
        amaxes = [
            part[0] if x.ndim == 2 else part for part, x in zip(jnp.split(vector, ends[:-1]), scaled, strict=True)
        ]
    found = []
    for bundle in bundles:
        amax = None
        if bundle.format.has_amax:
            mine, amaxes = amaxes[: len(bundle.kernels)], amaxes[len(bundle.kernels) :]
            amax = jnp.stack(mine, axis=-1)
            if bundle.one_scale:
                amax = _largest_of_each(amax, [len(layouts) for layouts in bundle.fused])
            if bundle.powers_of_two:
                amax = power_of_two_amax(amax, bundle.format)
        buffer = pack(bundle.kernels, bundle.format, amax, plan_of(bundle.fused, bundle.format))
        found.append(Packed(buffer, amax, bundle.format, tuple(bundle.slices)))
    return found


def _largest_of_each(amax: jax.Array, kernels: Sequence[int]) -> jax.Array:
    """Of each fused weight's kernels, `(..., kernels)`, all get the largest."""
    parts = jnp.split(amax, np.cumsum(kernels)[:-1], axis=-1)
    return jnp.concatenate([jnp.broadcast_to(jnp.max(p, -1, keepdims=True), p.shape) for p in parts], axis=-1)


def _over_slices(vector: jax.Array, bundles: Sequence[Bundle]) -> jax.Array:
    """The maximum of each weight's amax over the axes that cut any of them; on the others all ranks agree already.

    Experts that tp divides are other ones on each of its ranks: they go into the vector side by side.
    """
    axes = {TP, *(axis for bundle in bundles for layouts in bundle.fused for axis in layouts[0].axes)}
    names = tuple(axis for axis in reversed(AXES) if axis in axes)
    if degrees(names) == 1:
        return vector
    own = np.concatenate([bundle.divided for bundle in bundles])
    if not own.any():
        return lax.pmax(vector, names)
    rank, ranks = lax.axis_index(TP), degrees((TP,))
    side_by_side = jnp.zeros((ranks, int(own.sum())), vector.dtype).at[rank].set(vector[own])
    whole = lax.pmax(jnp.concatenate([vector[~own], jnp.ravel(side_by_side)]), names)
    shared, divided = jnp.split(whole, [int((~own).sum())])
    return vector.at[~own].set(shared).at[own].set(jnp.reshape(divided, (ranks, -1))[rank])


def gather_packed(packed: Packed, fused: Fused, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, ...]:
    """The fused weights of one layer, each as `gather_weight` gives it, from one gather of bytes.

    Args:
        packed: of one layer.
        fused: the layouts of each member's kernels; all with the same axes.
        dtype: of the weights.
    """
    slices = packed.buffer if packed.gathered else _all_slices(packed.buffer, fused, axis=0)
    exact = jnp.float32 if np.dtype(dtype) == np.float64 else dtype
    weights = unpack(slices, packed.format, packed.amax, plan_of(fused, packed.format), exact)
    return tuple(as_fused(weight.astype(dtype), layouts) for weight, layouts in zip(weights, fused, strict=True))


def gather_codes(packed: Packed, layouts: Sequence[Layout]) -> QuantizedArray:
    """The fused weight of one layer, alone in its bundle and of one scale, as the codes that travel: no kernel runs.

    Args:
        packed: of one layer, in a format without blocks.
        layouts: of its kernels, no experts'.
    """
    assert packed.amax is not None and packed.format.block is None
    slices = packed.buffer if packed.gathered else _all_slices(packed.buffer, [layouts], axis=0)
    plan = plan_of([layouts], packed.format)
    (matrix,) = plan.outputs(len(slices))
    codes = slices
    if slices.size != math.prod(matrix):  # sections begin at multiples of 16 bytes
        ends = [(section.start, section.start + section.bytes) for section, _ in plan.sections(packed.format)]
        codes = jnp.concatenate([slices[:, start:end] for start, end in ends], axis=1)
    return QuantizedArray(jnp.reshape(codes, matrix), None, packed.amax[0], packed.format, matrix)


def hold_layers(packed: Packed, fused: Fused, start: int, stop: int) -> Packed:
    """Layers `start` to `stop` (exclusive) of a stack with all ranks' slices, in one gather."""
    some = jax.tree.map(lambda a: a[start:stop], packed)
    return dataclasses.replace(some, buffer=_all_slices(some.buffer, fused, axis=1), gathered=True)


def _all_slices(buffer: jax.Array, fused: Fused, axis: int) -> jax.Array:
    if fused[0][0].gtp == 1:
        return jnp.expand_dims(buffer, axis)
    return lax.all_gather(buffer, fused[0][0].axes, axis=axis)


def plan_of(fused: Fused, form: Format) -> PackPlan:
    """How the kernels of a layer's weights share a buffer.

    Raises:
        ValueError: if a slice's rows cut the format's blocks in two, or are shorter than a block.
    """
    return _plan(tuple(map(tuple, fused)), form)


@functools.cache
def _plan(fused: tuple[tuple[Layout, ...], ...], form: Format) -> PackPlan:
    block_rows, block_cols = form.block or (1, 1)
    pieces = []
    for out, layouts in enumerate(fused):
        row = 0
        for layout in [one.matrix for _ in range(layouts[0].matrices) for one in layouts]:
            rows = layout.padded_rows // layout.gtp
            if layout.gtp > 1 and rows % block_rows:
                raise ValueError(
                    f"a weight of shape {layout.shape} has slices of {rows} rows, which cut {form.name}'s blocks of "
                    f"{block_rows} rows in two. Build the model with `alignment={form.alignment}`."
                )
            cols = layout.slice_shape[1 - layout.dim]
            if cols < block_cols:
                raise ValueError(
                    f"a weight of shape {layout.shape} has rows of {cols} elements on a rank, fewer than the "
                    f"{block_cols} of a block of {form.name}. Name its module in the recipe's `keep`, or choose "
                    "`gtp_jax.FP8()`, which has no blocks."
                )
            pieces.append(
                Piece(
                    rows=rows,
                    cols=cols,
                    transposed=layout.dim == 1,
                    total_rows=rows,
                    out=out,
                    out_row=row,
                )
            )
            row += rows
    return PackPlan(tuple(pieces), by_slice=True)


def _matrices(slices: Slices, layouts: Sequence[Layout]) -> list[jax.Array]:
    """The kernels' slices; of experts, every expert's kernels in turn."""
    if len(layouts[0].shape) == 2:
        return list(slices)
    return [x[..., expert, :, :] for expert in range(layouts[0].matrices) for x in slices]
