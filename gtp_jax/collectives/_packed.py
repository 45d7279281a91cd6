"""Quantized slices to whole weights. Called inside a `shard_map`.

All kernels of one layer travel as one buffer of bytes, even those of several modules. What comes out lies as
`gather_weight` would leave it, see [Note: the fused weight], so that nothing behind the gather knows whether there was
a format.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import Format, PackPlan, Piece
from ..mesh import GTP, TP, Layout, degree
from ..ops import multi_amax, pack, unpack
from ._weight import Slices

# The layouts of each fused weight's kernels.
Fused = Sequence[Sequence[Layout]]


@functools.partial(jax.tree_util.register_dataclass, data_fields=("buffer", "amax"), meta_fields=("format", "members"))
@dataclasses.dataclass(frozen=True)
class Packed:
    """This rank's slices of a layer's weights, or of a stack of layers', as they travel.

    Attributes:
        buffer: uint8 `(*stack, bytes)`.
        amax: float32 `(*stack, kernels)`, over all slices; `None` if the format has none. It does not travel.
        format: of the codes.
        members: names of the fused weights in it, in order.
    """

    buffer: jax.Array
    amax: jax.Array | None
    format: Format
    members: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Weights that are to travel in one buffer.

    Attributes:
        slices: by name of the fused weight, this rank's slices of its kernels, with the leading dimension of a stack or
            without.
        fused: the layouts of each one's kernels.
        format: of the codes.
    """

    slices: dict[Any, Slices]
    fused: Fused
    format: Format

    @property
    def kernels(self) -> list[jax.Array]:
        """All slices, in the order in which they travel."""
        return [_values(x) for slices in self.slices.values() for x in slices]


def pack_all(bundles: Sequence[Bundle]) -> list[Packed]:
    """Quantizes slices: one amax kernel and one reduction of one vector for all bundles, one launch for each.

    The amax of a weight is taken over the axes that cut it, gtp and tp, and never over replicas, which agree already.
    """
    scaled = [x for bundle in bundles if bundle.format.has_amax for x in bundle.kernels]
    stacks = [x[None] if x.ndim == 2 else x for x in scaled]
    amaxes: list[jax.Array] = []
    if stacks:
        vector = multi_amax(stacks, stacked=True)
        if degree(GTP) * degree(TP) > 1:
            vector = lax.pmax(vector, (TP, GTP))
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
        buffer = pack(bundle.kernels, bundle.format, amax, plan_of(bundle.fused, bundle.format))
        found.append(Packed(buffer, amax, bundle.format, tuple(bundle.slices)))
    return found


def gather_packed(packed: Packed, fused: Fused, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, ...]:
    """The fused weights of one layer, each as `gather_weight` gives it, from one gather of bytes.

    Args:
        packed: of one layer.
        fused: the layouts of each member's kernels.
        dtype: of the weights.
    """
    buffer = packed.buffer
    slices = lax.all_gather(buffer, GTP) if fused[0][0].gtp > 1 else buffer[None]
    exact = jnp.float32 if np.dtype(dtype) == np.float64 else dtype
    weights = unpack(slices, packed.format, packed.amax, plan_of(fused, packed.format), exact)
    return tuple(weight.astype(dtype) for weight in weights)


def plan_of(fused: Fused, form: Format) -> PackPlan:
    """How the kernels of a layer's weights share a buffer.

    Raises:
        ValueError: if a slice's rows cut the format's blocks in two.
    """
    return _plan(tuple(map(tuple, fused)), form)


@functools.cache
def _plan(fused: tuple[tuple[Layout, ...], ...], form: Format) -> PackPlan:
    block_rows = form.block[0] if form.block else 1
    pieces = []
    for out, layouts in enumerate(fused):
        row = 0
        for layout in layouts:
            rows = layout.padded_rows // layout.gtp
            if layout.gtp > 1 and rows % block_rows:
                raise ValueError(
                    f"a weight of shape {layout.shape} has slices of {rows} rows, which cut {form.name}'s blocks of "
                    f"{block_rows} rows in two. Build the model with `alignment={form.alignment}`."
                )
            pieces.append(
                Piece(
                    rows=rows,
                    cols=layout.slice_shape[1 - layout.dim],
                    transposed=layout.dim == 1,
                    total_rows=rows,
                    out=out,
                    out_row=row,
                )
            )
            row += rows
    return PackPlan(tuple(pieces), by_slice=True)


def _values(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if x.dtype == jnp.float64 else x
