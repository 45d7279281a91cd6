"""Grouped matmuls of E4M3 in blocks of 128: kernels that multiply codes on Hopper, and the values of codes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ... import native
from ...formats import FP8_BLOCKS, FP8_BLOCKS_1D, QuantizedArray
from .._operand import values_of
from .._order import Order, padded_shape
from ._hopper import TILE, along_out, reads_kernels
from ._tiles import cut_into_tiles

# [Note: tiles of experts]
# Expert kernels in tiles have codes `(shards, groups, part, in)`, and scales `(groups, ceil(shards * part / 128),
# ceil(in / 128))`: tiles begin at every 128th row of a group's kernel, and shards may cut them.


def multiplies_tiles(shape: tuple[int, ...], order: Order | None) -> bool:
    """Returns whether kernels multiply the codes of expert kernels `(shards, groups, part, features)` in tiles."""
    return reads_kernels(padded_shape(shape, order), jnp.uint8) and native.has("gtp_grouped_blocked_product", "CUDA")


def grid_of(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Returns the shape of the scales of expert kernels `(shards, groups, part, in)`; see [Note: tiles of experts]."""
    shards, groups, part, features = shape
    return groups, -(-shards * part // TILE), -(-features // TILE)


def values_of_tiles(kernels: QuantizedArray, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns the values of expert kernels in tiles, `(shards, groups, part, in)`; see [Note: tiles of experts]."""
    assert kernels.scales is not None
    shards, groups, part, _ = kernels.codes.shape
    rows = jnp.repeat(kernels.scales, TILE, axis=1)[:, : shards * part]
    scales = jnp.moveaxis(jnp.reshape(rows, (groups, shards, part, rows.shape[-1])), 1, 0)
    # each row gets the scales of its tiles, as if they were those of runs in `FP8_BLOCKS_1D`
    return values_of(QuantizedArray(kernels.codes, scales, None, FP8_BLOCKS_1D, kernels.matrix), dtype)


def transposed_tiles(kernels: QuantizedArray) -> QuantizedArray:
    """Returns the transpose of expert kernels in tiles, `(1, groups, in, shards * part)`: the same codes and scales,
    not rounded again."""
    assert kernels.scales is not None
    codes = along_out(kernels.codes)
    return QuantizedArray(codes, jnp.swapaxes(kernels.scales, 1, 2), None, FP8_BLOCKS, (codes.shape[2], codes.shape[3]))


def product(
    x: QuantizedArray, kernels: QuantizedArray, group_sizes: jax.Array, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Multiplies each row of `x`, in runs along its features, by its group's kernel in tiles.

    Args:
        x: row-wise codes `(rows, in)` of `FP8_BLOCKS_1D`.
        kernels: codes of `FP8_BLOCKS`; see [Note: tiles of experts].
        group_sizes: int32 `(groups,)`.
        dtype: the dtype of the result.

    Returns:
        `(rows, shards * part)`; rows after the last group are zeros.
    """
    assert x.scales is not None and kernels.scales is not None
    tiles = cut_into_tiles(group_sizes, x.codes.shape[0], TILE)
    scales = jnp.pad(x.scales.T, ((0, 0), (0, -x.codes.shape[0] % 4)))  # the kernel copies 16 bytes at least
    operands = x.codes, scales, kernels.codes, kernels.scales, *tiles
    return native.grouped_blocked_product(*operands, dtype=_narrow(dtype)).astype(dtype)


def outer(
    y: QuantizedArray, x: QuantizedArray, sizes: jax.Array, *, shards: int, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Returns for each group the sum over its rows of `y[row] x[row]^T`: `(shards, groups, part, in)`.

    Args:
        y, x: column-wise codes of `FP8_BLOCKS_1D`, `(out, rows)` and `(in, rows)`, from `in_whole_blocks`.
        sizes: int32 `(groups,)`, the number of rows of each group, in multiples of 128.
        shards: the number of shards.
        dtype: the dtype of the result.
    """
    assert y.scales is not None and x.scales is not None
    stops = jnp.cumsum(sizes, dtype=jnp.int32)
    operands = y.codes, y.scales.T, x.codes, x.scales.T, stops - sizes, stops
    return native.grouped_blocked_outer(*operands, shards=shards, dtype=_narrow(dtype)).astype(dtype)


def _narrow(dtype: jax.typing.DTypeLike) -> jax.typing.DTypeLike:
    """Returns the dtype in which kernels return a result."""
    return jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
