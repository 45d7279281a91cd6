"""Calls the grouped matmuls and the kernels that move their rows. They are CUDA only, and have no reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

from ._calls import LAUNCH_NS, call

# The rate of matmuls in XLA's scheduler, by the number of bytes per element of an operand.
_FLOPS_PER_NS = {1: 1_000_000, 2: 600_000}


def grouped_product(
    left: jax.Array,
    right: jax.Array,
    scales: jax.Array | None,
    tile_groups: jax.Array,
    starts: jax.Array,
    stops: jax.Array,
    *,
    left_e5m2: bool = False,
    right_e5m2: bool = False,
    backward: bool = False,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Multiplies each row by the matrix and the scale of its group. Hopper only.

    Args:
        left: `(rows, depth)`: FP8 codes in uint8, or values in bfloat16 or float16.
        right: `(shards, groups, part, depth)`, of the same dtype as `left`. With several shards, `part` must be a
            multiple of 8.
        scales: float32 `(groups,)`; `None` for scales of 1.
        tile_groups, starts, stops: the arrays of `cut_into_tiles`, for tiles of 128 rows.
        left_e5m2, right_e5m2: whether the codes of that operand are E5M2 instead of E4M3.
        backward: whether `left` is `(rows, shards * part)`, `right` is `(shards, groups, part, columns)`, and the
            contraction runs over `shards * part`. Only for values, not for codes.
        dtype: the dtype of the result: that of the values; for codes, bfloat16 or float32.

    Returns:
        `(rows, shards * part)`, or `(rows, columns)` with `backward`.
    """
    shards, _, part, width = right.shape
    rows, columns = left.shape[0], width if backward else shards * part
    operands = [left, right, _scales(scales), tile_groups, starts, stops]
    return multiply(
        "gtp_grouped_product",
        jax.ShapeDtypeStruct((rows, columns), dtype),
        operands,
        rows * shards * part * width,
        left_e5m2=left_e5m2,
        right_e5m2=right_e5m2,
        backward=backward,
    )


def grouped_outer(
    left: jax.Array,
    right: jax.Array,
    scales: jax.Array | None,
    starts: jax.Array,
    stops: jax.Array,
    *,
    shards: int,
    left_e5m2: bool = False,
    right_e5m2: bool = False,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Returns, for each group, the product of its rows of `left` and `right`, contracted over these rows. Hopper only.

    Args:
        left: codes `(high, rows)`, with a multiple of 128 rows per group, or values `(rows, high)`.
        right: codes `(wide, rows)`, or values `(rows, wide)`.
        scales: float32 `(groups,)`; `None` for scales of 1.
        starts, stops: int32 `(groups,)`, the first row of each group and the row after its last.
        shards: the number of shards of the result.
        left_e5m2, right_e5m2: whether the codes of that operand are E5M2 instead of E4M3.
        dtype: the dtype of the result: float32, or that of the values; for codes, float32 or bfloat16.

    Returns:
        `(shards, groups, high / shards, wide)`.
    """
    codes = left.dtype == jnp.uint8
    (high, rows), wide = (left.shape, right.shape[0]) if codes else (left.shape[::-1], right.shape[1])
    # in three dimensions: with four, of which one has size 1, XLA would transpose in two passes instead of one
    result = jax.ShapeDtypeStruct((shards * starts.size, high // shards, wide), dtype)
    operands = [left, right, _scales(scales), starts, stops]
    kinds = dict(left_e5m2=left_e5m2, right_e5m2=right_e5m2)
    found = multiply("gtp_grouped_outer", result, operands, high * wide * rows, **kinds)
    return jnp.reshape(found, (shards, *starts.shape, *result.shape[1:]))


def grouped_blocked_product(
    left: jax.Array,
    left_scales: jax.Array,
    right: jax.Array,
    right_scales: jax.Array,
    tile_groups: jax.Array,
    starts: jax.Array,
    stops: jax.Array,
    *,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Multiplies each row by the matrix of its group, both e4m3 codes in blocks of 128, with sums promoted to float32
    every 128 elements. Hopper only.

    Args:
        left: codes `(rows, depth)`.
        left_scales: float32 `(ceil(depth / 128), rows rounded up to 4)`, the inverses of the scales of its runs.
        right: codes `(shards, groups, part, depth)`. With several shards, `part` must be a multiple of 8.
        right_scales: float32 `(groups, ceil(shards * part / 128), ceil(depth / 128))`, the inverses of the scales of
            128 x 128 tiles, which begin at every 128th row of all shards of a group.
        tile_groups, starts, stops: the arrays of `cut_into_tiles`, for tiles of 128 rows.
        dtype: the dtype of the result, bfloat16 or float32.

    Returns:
        `(rows, shards * part)`.
    """
    rows, columns = left.shape[0], right.shape[0] * right.shape[2]
    result = jax.ShapeDtypeStruct((rows, columns), dtype)
    operands = [left, left_scales, right, right_scales, tile_groups, starts, stops]
    return multiply("gtp_grouped_blocked_product", result, operands, rows * columns * left.shape[1])


def grouped_blocked_outer(
    left: jax.Array,
    left_scales: jax.Array,
    right: jax.Array,
    right_scales: jax.Array,
    starts: jax.Array,
    stops: jax.Array,
    *,
    shards: int,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Returns, for each group, the product of its rows of `left` and `right`, contracted over these rows, both e4m3
    codes in runs of 128 rows, with sums promoted to float32 every 128 rows. Hopper only.

    Args:
        left: codes `(high, rows)`, with a multiple of 128 rows per group and in all.
        left_scales: float32 `(rows / 128, high)`, the inverses of the scales of its runs.
        right, right_scales: the same, with `wide` instead of `high`.
        starts, stops: as in `grouped_outer`.
        shards: the number of shards of the result.
        dtype: the dtype of the result, float32 or bfloat16.

    Returns:
        `(shards, groups, high / shards, wide)`.
    """
    (high, rows), wide = left.shape, right.shape[0]
    result = jax.ShapeDtypeStruct((shards * starts.size, high // shards, wide), dtype)  # as in `grouped_outer`
    operands = [left, left_scales, right, right_scales, starts, stops]
    found = multiply("gtp_grouped_blocked_outer", result, operands, high * wide * rows)
    return jnp.reshape(found, (shards, *starts.shape, *result.shape[1:]))


def take(rows: jax.Array, index: jax.Array) -> jax.Array:
    """Returns `rows[index]`, with zeros where `index` is negative or too large. GPUs only.

    Args:
        rows: `(rows, columns)`. The size of a row must be a multiple of 16 bytes.
        index: int32 `(places,)`.
    """
    return call(
        "gtp_take", jax.ShapeDtypeStruct((*index.shape, rows.shape[1]), rows.dtype), [rows, index], "sequential"
    )


def transpose(
    rows: jax.Array, starts: jax.Array, stops: jax.Array, *, matrices: int, index: jax.Array | None = None
) -> jax.Array:
    """Transposes rows of bytes in tiles of up to 128 rows, each padded with zeros to 128. GPUs only.

    Args:
        rows: uint8 `(rows, columns)`. The number of columns must be a multiple of 16.
        starts, stops: int32 `(tiles,)`, the first row of each tile and the row after its last.
        matrices: the number of matrices to make. Each consists of the same number of tiles, side by side.
        index: int32 `(places,)`. If given, `rows[index]` is transposed instead of `rows`, with zeros where the index is
            negative or too large, and `starts` and `stops` are rows of `rows[index]`.

    Returns:
        uint8 `(matrices, columns, tiles // matrices * 128)`.
    """
    shape = (matrices, rows.shape[1], starts.shape[0] // matrices * 128)
    places = jnp.zeros((0,), jnp.int32) if index is None else index
    return call("gtp_transpose", jax.ShapeDtypeStruct(shape, jnp.uint8), [rows, places, starts, stops], "sequential")


def _scales(scales: jax.Array | None) -> jax.Array:
    return jnp.zeros((0,), jnp.float32) if scales is None else scales


def multiply(target: str, result: Any, operands: Sequence[jax.Array], products: int, **attributes: bool) -> Any:
    """Calls a matmul, and gives XLA's scheduler its latency, which follows from the number of products."""
    rate = _FLOPS_PER_NS[operands[0].dtype.itemsize]
    with set_xla_metadata(latency_metadata=str(LAUNCH_NS + 2 * products // rate)):
        return jax.ffi.ffi_call(target, result, vmap_method="sequential")(*operands, **attributes)
