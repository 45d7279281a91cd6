"""Grouped matmuls on Hopper, in CUDA: of 16-bit values, of FP8 codes, and of E4M3 in blocks of 128."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ... import native
from ...formats import FP8_BLOCKS, FP8_E4M3, QuantizedArray
from ...mesh import supports_grouped_matmul
from .._operand import tensor_unit
from .._order import Order, padded_shape
from ._contract import GroupedMatmul, Problem, lacks_kernels
from ._tiles import cut_into_tiles

# The number of rows of a tile of the CUDA kernels.
TILE = 128


def _lacks(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> str:
    """Returns why the CUDA kernels do not multiply by expert kernels `(shards, groups, part, features)` of this dtype,
    including codes in uint8; an empty string if they do: on Hopper, if the TMA supports the sizes."""
    if not (supports_grouped_matmul() and native.has("gtp_grouped_product", "CUDA")):
        return "the CUDA kernels of this library run on Hopper GPUs (compute capability 9.0)"
    shards, _, part, features = shape
    run = 16 // jnp.dtype(dtype).itemsize
    if features % run or shards * part % run or (shards > 1 and part % 8) or min(shape) == 0:
        return f"the CUDA kernels copy 16 bytes at once, and the weight has the shape {shape}"
    return ""


def _lacks_values(problem: Problem) -> str:
    return lacks_kernels(problem) or _lacks(problem.shape, problem.dtype)


def _product_of_values(
    x: jax.Array, weight: jax.Array, group_sizes: jax.Array, *, dtype: np.dtype, transposed: bool
) -> jax.Array:
    tiles = cut_into_tiles(group_sizes, x.shape[0], TILE)
    return native.grouped_product(x, weight, None, *tiles, backward=not transposed, dtype=dtype)


def _outer_of_values(y: jax.Array, x: jax.Array, group_sizes: jax.Array, *, dtype: np.dtype, shards: int) -> jax.Array:
    stops = jnp.minimum(jnp.cumsum(group_sizes, dtype=jnp.int32), x.shape[0])
    starts = jnp.append(jnp.int32(0), stops[:-1])
    out = dtype if dtype == x.dtype else np.dtype(np.float32)
    return native.grouped_outer(y, x, None, starts, stops, shards=shards, dtype=out).astype(dtype)


HOPPER = GroupedMatmul(native=True, codes=None, lacks=_lacks_values, product=_product_of_values, outer=_outer_of_values)


def multiplies_fp8_groups(shape: tuple[int, ...]) -> bool:
    """Returns whether kernels multiply the codes of a weight `(shards, groups, part, features)` directly."""
    return not _lacks(shape, jnp.uint8)


def _lacks_fp8(problem: Problem) -> str:
    return lacks_kernels(problem) or _lacks(problem.shape, jnp.uint8)


def _product_of_fp8(
    x: QuantizedArray, weight: QuantizedArray, group_sizes: jax.Array, *, dtype: np.dtype, transposed: bool
) -> jax.Array:
    codes = weight.codes if transposed else _along_out(weight.codes)
    units = tensor_unit(weight)[0]  # of each group, as all shards have the same
    tiles = cut_into_tiles(group_sizes, x.codes.shape[0], TILE)
    scales = units * tensor_unit(x)
    kinds = dict(left_e5m2=_is_e5m2(x), right_e5m2=False)
    return native.grouped_product(x.codes, codes, scales, *tiles, **kinds, dtype=_narrow(dtype)).astype(dtype)


def _outer_of_fp8(
    y: QuantizedArray, x: QuantizedArray, group_sizes: jax.Array, *, dtype: np.dtype, shards: int
) -> jax.Array:
    stops = jnp.cumsum(group_sizes, dtype=jnp.int32)
    scales = jnp.broadcast_to(tensor_unit(y) * tensor_unit(x), group_sizes.shape)
    operands = y.codes, x.codes, scales, stops - group_sizes, stops
    kinds = dict(left_e5m2=_is_e5m2(y), right_e5m2=False)
    return native.grouped_outer(*operands, **kinds, shards=shards, dtype=_narrow(dtype)).astype(dtype)


def _is_e5m2(q: QuantizedArray) -> bool:
    return q.format.element == "e5m2"


# All rows share one scale, and each group of the weight has one.
HOPPER_FP8 = GroupedMatmul(native=True, codes=FP8_E4M3, lacks=_lacks_fp8, product=_product_of_fp8, outer=_outer_of_fp8)


def multiplies_tiles(shape: tuple[int, ...], order: Order | None) -> bool:
    """Returns whether kernels multiply the codes of expert kernels `(shards, groups, part, features)` in tiles."""
    return multiplies_fp8_groups(padded_shape(shape, order)) and native.has("gtp_grouped_blocked_product", "CUDA")


def _lacks_tiles(problem: Problem) -> str:
    has = native.has("gtp_grouped_blocked_product", "CUDA")
    return _lacks_fp8(problem) or ("" if has else native.describe())


def _product_of_tiles(
    x: QuantizedArray, weight: QuantizedArray, group_sizes: jax.Array, *, dtype: np.dtype, transposed: bool
) -> jax.Array:
    """Multiplies rows of `FP8_BLOCKS_1D` by a weight in tiles; see [Note: tiles of experts]."""
    assert x.scales is not None and weight.scales is not None
    codes, scales_of_tiles = weight.codes, weight.scales
    if not transposed:  # the same codes and scales, not rounded again
        codes, scales_of_tiles = _along_out(codes), jnp.swapaxes(scales_of_tiles, 1, 2)
    tiles = cut_into_tiles(group_sizes, x.codes.shape[0], TILE)
    scales = jnp.pad(x.scales.T, ((0, 0), (0, -x.codes.shape[0] % 4)))  # the kernel copies 16 bytes at least
    operands = x.codes, scales, codes, scales_of_tiles, *tiles
    return native.grouped_blocked_product(*operands, dtype=_narrow(dtype)).astype(dtype)


def _outer_of_tiles(
    y: QuantizedArray, x: QuantizedArray, group_sizes: jax.Array, *, dtype: np.dtype, shards: int
) -> jax.Array:
    """Multiplies copies of `FP8_BLOCKS_1D`, `(out, rows)` and `(in, rows)`, from `in_whole_blocks`."""
    assert y.scales is not None and x.scales is not None
    stops = jnp.cumsum(group_sizes, dtype=jnp.int32)
    operands = y.codes, y.scales.T, x.codes, x.scales.T, stops - group_sizes, stops
    return native.grouped_blocked_outer(*operands, shards=shards, dtype=_narrow(dtype)).astype(dtype)


HOPPER_TILES = GroupedMatmul(
    native=True, codes=FP8_BLOCKS, lacks=_lacks_tiles, product=_product_of_tiles, outer=_outer_of_tiles
)


def _narrow(dtype: np.dtype) -> jax.typing.DTypeLike:
    """Returns the dtype in which products of codes return a result."""
    return jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32


def _along_out(codes: jax.Array) -> jax.Array:
    """Transposes the codes of expert kernels: maps `(shards, groups, part, in)` to `(1, groups, in, shards * part)`."""
    shards, groups, part, features = codes.shape
    if part % TILE:
        return jnp.reshape(jnp.transpose(codes, (1, 3, 0, 2)), (1, groups, features, shards * part))
    group, shard, tile = np.mgrid[:groups, :shards, : part // TILE]
    starts = jnp.asarray(((shard * groups + group) * part + tile * TILE).ravel(), jnp.int32)
    return native.transpose(jnp.reshape(codes, (-1, features)), starts, starts + TILE, matrices=groups)[None]
