"""Calls of the grouped matmuls and of what moves their rows: CUDA alone, and no reference has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

from ._calls import LAUNCH_NS, call

# The rate of matmuls that XLA's scheduler sees, by bytes of an operand's element.
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
    """Returns each row times its group's matrix, times the group's scale; on Hopper alone.

    Args:
        left: `(rows, depth)`: FP8 codes in uint8, or values in bfloat16 or float16.
        right: of the same dtype, `(shards, groups, part, depth)`; of several shards, `part` is a multiple of 8.
        scales: float32 `(groups,)`; none for 1.
        tile_groups, starts, stops: as `cut_into_tiles` makes them, of 128 rows.
        left_e5m2, right_e5m2: the element of codes; E4M3 otherwise.
        backward: whether `left` is `(rows, shards * part)` and the contraction runs over that, `right` being
            `(shards, groups, part, columns)`; of values alone.
        dtype: of the result `(rows, shards * part)` or `(rows, columns)`: that of values, bfloat16 or float32 of codes.
    """
    shards, _, part, width = right.shape
    rows, columns = left.shape[0], width if backward else shards * part
    operands = [left, right, _scales(scales), tile_groups, starts, stops]
    return _multiply(
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
    """Returns, of each group, products summed from its start to its stop; on Hopper alone.

    Args:
        left: codes `(high, rows)`, of whole 128 a group, or values `(rows, high)`.
        right: codes `(wide, rows)`, or values `(rows, wide)`.
        scales: float32 `(groups,)`; none for 1.
        starts, stops: int32 `(groups,)`.
        shards: of the result.
        left_e5m2, right_e5m2: the element of codes; E4M3 otherwise.
        dtype: of the result `(shards, groups, high / shards, wide)`: float32, that of values, or bfloat16 of codes.
    """
    codes = left.dtype == jnp.uint8
    (high, rows), wide = (left.shape, right.shape[0]) if codes else (left.shape[::-1], right.shape[1])
    # in three dimensions: with four, of which one is 1, XLA transposes in two passes what it can in one
    result = jax.ShapeDtypeStruct((shards * starts.size, high // shards, wide), dtype)
    operands = [left, right, _scales(scales), starts, stops]
    kinds = dict(left_e5m2=left_e5m2, right_e5m2=right_e5m2)
    found = _multiply("gtp_grouped_outer", result, operands, high * wide * rows, **kinds)
    return jnp.reshape(found, (shards, *starts.shape, *result.shape[1:]))


def take(rows: jax.Array, index: jax.Array) -> jax.Array:
    """Returns `rows[index]`, with zeros where `index` is no row's; on GPUs alone.

    Args:
        rows: `(rows, columns)`, a multiple of 16 bytes each.
        index: int32 `(places,)`.
    """
    return call(
        "gtp_take", jax.ShapeDtypeStruct((*index.shape, rows.shape[1]), rows.dtype), [rows, index], "sequential"
    )


def transpose(
    rows: jax.Array, starts: jax.Array, stops: jax.Array, *, matrices: int, index: jax.Array | None = None
) -> jax.Array:
    """Returns rows of bytes transposed, in tiles of up to 128 rows with zeros behind them; on GPUs alone.

    Args:
        rows: uint8 `(rows, columns)`, a multiple of 16 columns.
        starts, stops: int32 `(tiles,)`.
        matrices: how many to make, of equally many tiles, one beside the other.
        index: int32 `(places,)`: which row stands at each place, which `starts` and `stops` then count; zeros where it
            is no row's. By default rows stand at places of their own.

    Returns:
        uint8 `(matrices, columns, tiles // matrices * 128)`.
    """
    shape = (matrices, rows.shape[1], starts.shape[0] // matrices * 128)
    places = jnp.zeros((0,), jnp.int32) if index is None else index
    return call("gtp_transpose", jax.ShapeDtypeStruct(shape, jnp.uint8), [rows, places, starts, stops], "sequential")


def _scales(scales: jax.Array | None) -> jax.Array:
    return jnp.zeros((0,), jnp.float32) if scales is None else scales


def _multiply(target: str, result: Any, operands: Sequence[jax.Array], products: int, **attributes: bool) -> Any:
    rate = _FLOPS_PER_NS[operands[0].dtype.itemsize]
    with set_xla_metadata(latency_metadata=str(LAUNCH_NS + 2 * products // rate)):
        return jax.ffi.ffi_call(target, result, vmap_method="sequential")(*operands, **attributes)
