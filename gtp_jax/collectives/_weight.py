"""Slices to a whole weight, and its gradient back to slices. Called inside a `shard_map`.

[Note: the fused weight]
A layer may hold several kernels that meet the same input (query, key, value; gate and up). Their slices are laid one
after the other and travel in one gather, so the gathered weight holds, rank after rank, every kernel's rows:

    (gtp, rows of kernel 0 | rows of kernel 1 | ..., features_in)

It goes into one matmul as it is. `split_features` then takes the kernels' outputs apart in the activation, where
cutting is free, and drops the columns that come from padding. Of a layer of experts a rank's part has every expert's
kernels in turn, and the fused weight is `(gtp, experts, rows of kernel 0 | rows of kernel 1 | ..., features_in)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..mesh import Layout
from ..ops import row_major

Slices = tuple[jax.Array, ...]

# XLA's CPU backend widens 16-bit floats in collectives; as integers they keep their true size on every backend.
WIRE = {np.dtype(jnp.bfloat16): jnp.uint16, np.dtype(jnp.float16): jnp.uint16}


def gather_weight(slices: Slices, layouts: Sequence[Layout], dtype: jax.typing.DTypeLike) -> jax.Array:
    """The fused weight of a layer, from this rank's slices.

    Args:
        slices: one array a kernel, each of its layout's `slice_shape`.
        layouts: the kernels' layouts; all with the same experts, axes and gtp degree.
        dtype: the dtype on the wire and in the matmul.

    Returns:
        `(gtp * rows, other)`, see [Note: the fused weight]. With gtp 1 no collective is issued.
    """
    rows = [jnp.moveaxis(s.astype(dtype), layout.dim, -2) for s, layout in zip(slices, layouts, strict=True)]
    part = rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=-2)
    if layouts[0].gtp == 1:
        return as_fused(part, layouts)
    axes, wire = layouts[0].axes, WIRE.get(part.dtype)
    part = jnp.reshape(part, (-1, part.shape[-1]))
    if wire is None:
        return as_fused(lax.all_gather(part, axes, axis=0, tiled=True), layouts)
    whole = lax.all_gather(lax.bitcast_convert_type(part, wire), axes, axis=0, tiled=True)
    return as_fused(lax.bitcast_convert_type(whole, part.dtype), layouts)


def as_fused(weight: jax.Array, layouts: Sequence[Layout]) -> jax.Array:
    """All ranks' rows, one after another, in the shape of the fused weight."""
    if len(layouts[0].shape) == 2:
        return weight
    return jnp.reshape(weight, (layouts[0].gtp, layouts[0].matrices, -1, weight.shape[-1]))


def scatter_gradient(
    gradient: jax.Array, layouts: Sequence[Layout], dtype: jax.typing.DTypeLike, out: Sequence[jax.typing.DTypeLike]
) -> Slices:
    """Sums the fused weight's gradient over the gtp axis and returns this rank's slices: `gather_weight`, transposed.

    Args:
        gradient: of the fused weight's shape.
        layouts: as in `gather_weight`.
        dtype: the dtype on the wire, in which the sum is taken: of bfloat16, every partial sum is rounded to it.
            `exchange_gradients` rounds each rank's gradient alone.
        out: dtype of each returned slice.
    """
    part = jnp.reshape(gradient.astype(dtype), (-1, gradient.shape[-1]))
    if layouts[0].gtp > 1:
        part = lax.psum_scatter(part, layouts[0].axes, scatter_dimension=0, tiled=True)
    return as_slices(part, layouts, out)


def as_slices(part: jax.Array, layouts: Sequence[Layout], out: Sequence[jax.typing.DTypeLike]) -> Slices:
    """This rank's rows of a fused weight, as its kernels' slices in the dtypes `out`."""
    part = jnp.reshape(part, (*layouts[0].slice_shape[:-2], -1, part.shape[-1]))
    ends = np.cumsum([layout.padded_rows // layout.gtp for layout in layouts])
    pieces = jnp.split(part, ends[:-1], axis=-2)
    # else XLA keeps the wire's order, and transposes parameter and moments inside the optimizer's kernel
    return tuple(
        row_major(jnp.moveaxis(piece, -2, layout.dim).astype(kind))
        for piece, layout, kind in zip(pieces, layouts, out, strict=True)
    )


def split_features(y: jax.Array, layouts: Sequence[Layout]) -> Slices:
    """The kernels' outputs, each `(..., rows)`, from the product with a fused weight, `(..., gtp * rows)`."""
    gtp = layouts[0].gtp
    if len(layouts) == 1:
        return (y[..., : layouts[0].rows],)
    by_rank = jnp.reshape(y, (*y.shape[:-1], gtp, -1))
    ends = np.cumsum([layout.padded_rows // gtp for layout in layouts])
    pieces = jnp.split(by_rank, ends[:-1], axis=-1)
    return tuple(
        jnp.reshape(piece, (*y.shape[:-1], layout.padded_rows))[..., : layout.rows]
        for piece, layout in zip(pieces, layouts, strict=True)
    )


def gathered(
    slices: Slices,
    sent: Any,
    gather: Callable[[Any], jax.Array],
    scatter: Callable[[jax.Array], Slices],
) -> jax.Array:
    """A gather with a scatter as its gradient, for a layer that stands outside a chain.

    Args:
        slices: what the gradient belongs to.
        sent: what is gathered: the slices, or what they were quantized to.
        gather: `sent` to the fused weight.
        scatter: its gradient to that of the slices.
    """

    @jax.custom_vjp
    def apply(slices: Slices, sent: Any) -> jax.Array:
        return gather(sent)

    def fwd(slices: Slices, sent: Any) -> tuple[jax.Array, None]:
        return gather(sent), None

    def bwd(residuals: None, gradient: jax.Array) -> tuple[Slices, None]:
        del residuals
        return scatter(gradient), None

    apply.defvjp(fwd, bwd)
    return apply(slices, sent)
