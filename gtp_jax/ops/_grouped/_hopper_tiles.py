"""Grouped matmuls of E4M3 in blocks of 128 on Hopper, in CUDA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ... import native
from ...formats import FP8_BLOCKS, QuantizedArray
from .._order import Order, padded_shape
from ._contract import GroupedMatmul, Problem, lacks_kernels
from ._hopper import TILE, along_out, lacks_sizes, result_dtype
from ._tiles import cut_into_tiles


def _product(
    x: QuantizedArray, weight: QuantizedArray, group_sizes: jax.Array, *, dtype: np.dtype, transposed: bool
) -> jax.Array:
    """Multiplies rows of `FP8_BLOCKS_1D` by a weight in tiles; see [Note: tiles of experts]."""
    assert x.scales is not None and weight.scales is not None
    codes, scales_of_tiles = weight.codes, weight.scales
    if not transposed:  # the same codes and scales, not rounded again
        codes, scales_of_tiles = along_out(codes), jnp.swapaxes(scales_of_tiles, 1, 2)
    tiles = cut_into_tiles(group_sizes, x.codes.shape[0], TILE)
    scales = jnp.pad(x.scales.T, ((0, 0), (0, -x.codes.shape[0] % 4)))  # the kernel copies 16 bytes at least
    operands = x.codes, scales, codes, scales_of_tiles, *tiles
    return native.grouped_blocked_product(*operands, dtype=result_dtype(dtype)).astype(dtype)


def _outer(y: QuantizedArray, x: QuantizedArray, group_sizes: jax.Array, *, dtype: np.dtype, shards: int) -> jax.Array:
    """Multiplies copies of `FP8_BLOCKS_1D`, `(out, rows)` and `(in, rows)`, from `in_whole_blocks`."""
    assert y.scales is not None and x.scales is not None
    stops = jnp.cumsum(group_sizes, dtype=jnp.int32)
    operands = y.codes, y.scales.T, x.codes, x.scales.T, stops - group_sizes, stops
    return native.grouped_blocked_outer(*operands, shards=shards, dtype=result_dtype(dtype)).astype(dtype)


def _lacks(problem: Problem) -> str:
    return lacks_kernels(problem) or _lacks_tiles(problem.shape)


HOPPER_TILES = GroupedMatmul(native=True, codes=FP8_BLOCKS, lacks=_lacks, product=_product, outer=_outer)


def multiplies_tiles(shape: tuple[int, ...], order: Order | None) -> bool:
    """Returns whether kernels multiply the codes of expert kernels `(shards, groups, part, features)` in tiles."""
    return not _lacks_tiles(padded_shape(shape, order))


def _lacks_tiles(shape: tuple[int, ...]) -> str:
    has = native.has("gtp_grouped_blocked_product", "CUDA")
    return lacks_sizes(shape, jnp.uint8) or ("" if has else native.describe())
