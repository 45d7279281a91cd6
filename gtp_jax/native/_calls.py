"""One call a handler: the shapes of its results, and how long it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

from ..formats import RUN, Format, PackPlan, codes_shape, scales_shape

_NOTHING = jax.ShapeDtypeStruct((0,), jnp.uint8)

# The cost of a kernel that XLA's scheduler sees: a launch, and the bytes it moves at a Hopper GPU's rate.
_LAUNCH_NS = 2000
_BYTES_PER_NS = 4000
_FLOPS_PER_NS = 1_000_000


def multi_amax(arrays: Sequence[jax.Array], *, stacked: bool) -> jax.Array:
    """See `reference.multi_amax`."""
    parts = [x.shape[0] if stacked else 1 for x in arrays]
    if not sum(parts):
        return jnp.zeros((0,), jnp.float32)
    result = jax.ShapeDtypeStruct((sum(parts),), jnp.float32)
    return _call("gtp_multi_amax", result, arrays, "sequential", parts=np.array(parts, np.int64))


def hadamard_amax(x: jax.Array) -> jax.Array:
    """See `reference.hadamard_amax`."""
    return _call("gtp_hadamard_amax", jax.ShapeDtypeStruct((), jnp.float32), [x], "sequential")


def quantize(
    x: jax.Array,
    amax: jax.Array,
    amax_columns: jax.Array,
    key: jax.Array,
    *,
    format: Format,
    hadamard: bool,
    stochastic: bool,
    rows: bool,
    columns: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """See `reference.quantize`."""
    *lead, m, k = x.shape
    padded = -(-m // RUN) * RUN if hadamard else m
    if rows and columns and amax.ndim != amax_columns.ndim:  # the handler reads both alike
        longest = max(amax.shape, amax_columns.shape, key=len)
        amax, amax_columns = (
            jnp.broadcast_to(jnp.reshape(a, (*a.shape, *(1,) * (len(longest) - a.ndim))), longest)
            for a in (amax, amax_columns)
        )
    results = [
        *(_copy(format, tuple(lead), (m, k), False) if rows else (_NOTHING, _NOTHING)),
        *(_copy(format, tuple(lead), (padded, k), True) if columns else (_NOTHING, _NOTHING)),
    ]
    return tuple(
        _call(
            "gtp_quantize",
            results,
            [x, amax, amax_columns, key],
            # examples that draw random numbers each count their runs from 0
            "sequential" if stochastic else "broadcast_all",
            format=np.int32(format.code),
            hadamard=hadamard,
            stochastic=stochastic,
            rows=rows,
            columns=columns,
        )
    )


def dequantize(
    codes: jax.Array,
    scales: jax.Array,
    amax: jax.Array,
    *,
    format: Format,
    columns: bool,
    shape: tuple[int, ...],
    dtype: jnp.dtype,
) -> jax.Array:
    """See `reference.dequantize`."""
    result = jax.ShapeDtypeStruct((*codes.shape[:-2], *shape[-2:]), dtype)
    operands = [codes, scales, amax]
    return _call("gtp_dequantize", result, operands, "broadcast_all", format=np.int32(format.code), columns=columns)


def pack(shards: Sequence[jax.Array], amax: jax.Array, *, format: Format, plan: PackPlan) -> jax.Array:
    """See `reference.pack`."""
    result = jax.ShapeDtypeStruct((*amax.shape[:-1], plan.bytes(format)), jnp.uint8)
    return _call("gtp_pack", result, [amax, *shards], "broadcast_all", **_plan(format, plan))


def unpack(
    buffer: jax.Array, amax: jax.Array, *, format: Format, plan: PackPlan, dtype: jnp.dtype
) -> tuple[jax.Array, ...]:
    """See `reference.unpack`."""
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape in plan.outputs(buffer.shape[0])]
    attributes = {**_plan(format, plan), "by_shard": plan.by_shard}
    return tuple(_call("gtp_unpack", results, [buffer, amax], "sequential", **attributes))


def grouped_product(
    left: jax.Array,
    right: jax.Array,
    scales: jax.Array,
    tile_groups: jax.Array,
    starts: jax.Array,
    stops: jax.Array,
    *,
    left_e5m2: bool,
    right_e5m2: bool,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Returns each row of FP8 codes times its group's matrix, times the group's scale; on Hopper alone.

    Args:
        left: uint8 `(rows, depth)`.
        right: uint8 `(shards, groups, part, depth)`; of several shards, `part` is a multiple of 128.
        scales: float32 `(groups,)`.
        tile_groups, starts, stops: as `cut_into_tiles` makes them, of 128 rows.
        left_e5m2, right_e5m2: the element; E4M3 otherwise.
        dtype: of the result `(rows, shards * part)`, bfloat16 or float32.
    """
    (rows, depth), columns = left.shape, right.shape[0] * right.shape[2]
    result = jax.ShapeDtypeStruct((rows, columns), dtype)
    operands = [left, right, scales, tile_groups, starts, stops]
    return _multiply("gtp_grouped_product", result, operands, rows * columns * depth, left_e5m2, right_e5m2)


def grouped_outer(
    left: jax.Array,
    right: jax.Array,
    scales: jax.Array,
    starts: jax.Array,
    stops: jax.Array,
    *,
    shards: int,
    left_e5m2: bool,
    right_e5m2: bool,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Returns, of each group, products of FP8 codes summed from its start to its stop, whole 128; on Hopper alone.

    Args:
        left: uint8 `(high, rows)`.
        right: uint8 `(wide, rows)`.
        scales: float32 `(groups,)`.
        starts, stops: int32 `(groups,)`.
        shards: of the result; of several, each has a multiple of 128 rows of `left`.
        left_e5m2, right_e5m2: the element; E4M3 otherwise.
        dtype: of the result `(shards, groups, high / shards, wide)`, bfloat16 or float32.
    """
    (high, rows), wide = left.shape, right.shape[0]
    # in three dimensions: with four, of which one is 1, XLA transposes in two passes what it can in one
    result = jax.ShapeDtypeStruct((shards * scales.size, high // shards, wide), dtype)
    operands = [left, right, scales, starts, stops]
    found = _multiply("gtp_grouped_outer", result, operands, high * wide * rows, left_e5m2, right_e5m2)
    return jnp.reshape(found, (shards, *scales.shape, *result.shape[1:]))


def transpose(rows: jax.Array, starts: jax.Array, stops: jax.Array, *, matrices: int) -> jax.Array:
    """Returns rows of bytes transposed, in tiles of up to 128 rows with zeros behind them; on GPUs alone.

    Args:
        rows: uint8 `(rows, columns)`, a multiple of 16 columns.
        starts, stops: int32 `(tiles,)`.
        matrices: how many to make, of equally many tiles, one beside the other.

    Returns:
        uint8 `(matrices, columns, tiles // matrices * 128)`.
    """
    shape = (matrices, rows.shape[1], starts.shape[0] // matrices * 128)
    return _call("gtp_transpose", jax.ShapeDtypeStruct(shape, jnp.uint8), [rows, starts, stops], "sequential")


def _multiply(
    target: str, result: Any, operands: Sequence[jax.Array], products: int, left_e5m2: bool, right_e5m2: bool
) -> Any:
    with set_xla_metadata(latency_metadata=str(_LAUNCH_NS + 2 * products // _FLOPS_PER_NS)):
        return jax.ffi.ffi_call(target, result, vmap_method="sequential")(
            *operands, left_e5m2=left_e5m2, right_e5m2=right_e5m2
        )


def _copy(
    format: Format, lead: tuple[int, ...], matrix: tuple[int, int], columns: bool
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    scales = scales_shape(format, matrix, columns)
    return (
        jax.ShapeDtypeStruct((*lead, *codes_shape(format, matrix, columns)), jnp.uint8),
        _NOTHING if scales is None else jax.ShapeDtypeStruct((*lead, *scales), jnp.uint8),
    )


def _plan(format: Format, plan: PackPlan) -> dict[str, Any]:
    numbers = [
        (piece.rows, piece.cols, piece.transposed, piece.total_rows, piece.out, piece.out_row) for piece in plan.pieces
    ]
    return {"format": np.int32(format.code), "table": np.array(numbers, np.int64).reshape(-1)}


def _call(target: str, results: Any, operands: Sequence[jax.Array], vmap_method: str, **attributes: Any) -> Any:
    moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in [*operands, *jax.tree.leaves(results)])
    with set_xla_metadata(latency_metadata=str(_LAUNCH_NS + moved // _BYTES_PER_NS)):
        return jax.ffi.ffi_call(target, results, vmap_method=vmap_method)(*operands, **attributes)
