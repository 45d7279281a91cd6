"""Quantized slices to a whole weight. Called inside a `shard_map`.

The slices of one layer travel as one buffer of bytes. What comes out lies as `gather_weight` would leave it, see
[Note: the fused weight], so that nothing behind the gather knows whether there was a format.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import Format, PackPlan, Piece
from ..mesh import GTP, TP, Layout, degree
from ..ops import multi_amax, pack, unpack
from ._weight import Slices


@functools.partial(jax.tree_util.register_dataclass, data_fields=("buffer", "amax"), meta_fields=("format",))
@dataclasses.dataclass(frozen=True)
class Packed:
    """This rank's slices of a layer's kernels, or of a stack of layers', as they travel.

    Attributes:
        buffer: uint8 `(*stack, bytes)`.
        amax: float32 `(*stack, kernels)`, over all slices; `None` if the format has none. It does not travel.
        format: of the codes.
    """

    buffer: jax.Array
    amax: jax.Array | None
    format: Format


def pack_all(
    owned: Sequence[tuple[Slices, Sequence[Layout], Format]],
) -> list[Packed]:
    """Quantizes the slices of all owners: one amax kernel and one reduction of one vector for the whole model.

    The amax of a weight is taken over the axes that cut it, gtp and tp, and never over replicas, which agree already.

    Args:
        owned: of each owner its kernels' slices (with the leading dimension of a stack or without), their layouts and
            the format.
    """
    scaled = [slices for slices, _, form in owned if form.has_amax]
    flat = [_values(x)[None] if x.ndim == 2 else _values(x) for slices in scaled for x in slices]
    amaxes = iter(())
    if flat:
        vector = multi_amax(flat, stacked=True)
        if degree(GTP) * degree(TP) > 1:
            vector = lax.pmax(vector, (TP, GTP))
        ends = np.cumsum([x.shape[0] for x in flat])
        amaxes = iter(jnp.split(vector, ends[:-1]))
    found = []
    for slices, layouts, form in owned:
        amax = jnp.stack([next(amaxes) for _ in slices], axis=-1) if form.has_amax else None
        if amax is not None and slices[0].ndim == 2:
            amax = amax[0]
        buffer = pack([_values(x) for x in slices], form, amax, plan_of(layouts, form))
        found.append(Packed(buffer, amax, form))
    return found


def gather_packed(packed: Packed, layouts: Sequence[Layout], dtype: jax.typing.DTypeLike) -> jax.Array:
    """The fused weight of one layer, as `gather_weight` gives it, from one gather of bytes.

    Args:
        packed: of one layer.
        layouts: the kernels' layouts.
        dtype: of the weight.
    """
    buffer = packed.buffer
    slices = lax.all_gather(buffer, GTP) if layouts[0].gtp > 1 else buffer[None]
    exact = jnp.float32 if np.dtype(dtype) == np.float64 else dtype
    (whole,) = unpack(slices, packed.format, packed.amax, plan_of(layouts, packed.format), exact)
    return whole.astype(dtype)


def plan_of(layouts: Sequence[Layout], form: Format) -> PackPlan:
    """How one layer's kernels share a buffer.

    Raises:
        ValueError: if a slice's rows cut the format's blocks in two.
    """
    return _plan(tuple(layouts), form)


@functools.cache
def _plan(layouts: tuple[Layout, ...], form: Format) -> PackPlan:
    pieces, row = [], 0
    for layout in layouts:
        rows = layout.padded_rows // layout.gtp
        block_rows = form.block[0] if form.block else 1
        if layout.gtp > 1 and rows % block_rows:
            raise ValueError(
                f"a weight of shape {layout.shape} has slices of {rows} rows, which cut {form.name}'s blocks of "
                f"{block_rows} rows in two. Build the model with `alignment={form.alignment}`."
            )
        cols = layout.slice_shape[1 - layout.dim]
        pieces.append(Piece(rows=rows, cols=cols, transposed=layout.dim == 1, total_rows=rows, out=0, out_row=row))
        row += rows
    return PackPlan(tuple(pieces), by_slice=True)


def _values(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if x.dtype == jnp.float64 else x
