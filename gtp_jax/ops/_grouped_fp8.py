"""The matmul of a layer of experts in FP8: forward, and both of backward."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float, Int32

from .. import native
from ..formats import FP8_E4M3, Format, QuantizedArray
from ..mesh import supports_grouped_fp8
from ._amax import multi_amax, power_of_two_amax
from ._grouped_matmul import by_group, by_shard, check_grouped, kernels_of
from ._implementation import Implementation
from ._operand import operand_amax, quantizable, tensor_unit, values_of
from ._quantize import quantize
from ._quantize_fused import amax_fused, quantize_fused
from ._save import save_for_backward
from ._slot import SlottedWeight
from ._tiles import cut_into_tiles

# Rows of a tile of the kernels for GPUs, and of what groups are filled up to where rows are contracted.
_TILE = 128


def grouped_fp8(
    x: Float[jax.Array, "rows features_in"],
    weight: Float[jax.Array, "shards groups part features_in"] | SlottedWeight,
    group_sizes: Int32[jax.Array, " groups"],
    gradients: Format,
    *,
    implementation: Implementation | None = None,
) -> Float[jax.Array, "rows features_out"]:
    """Returns `grouped_matmul` of operands rounded to FP8, each scaled by its own amax, as `linear_fp8` rounds them.

    The input and the incoming gradient have one scale for all rows, each group's weight one of its own. Scales are
    powers of two, so that a row's product depends on no other row, short of underflow.

    On Hopper the codes are multiplied as they are; sums are those of its tensor cores, which cuBLASLt's fast
    accumulation uses too: exact products, added with 14 bits at least. Elsewhere the same numbers are multiplied in the
    dtype of `x`.

    Args:
        x: as in `grouped_matmul`; bfloat16, float16, float32, or float64, which is rounded to float32 first.
        weight: likewise; with a slot, also the codes in which it travelled, in E4M3 and row-wise, of one scale a group.
        group_sizes: likewise.
        gradients: `FP8_E5M2` or `FP8_E4M3`.
        implementation: as in `grouped_matmul`.

    Returns:
        As `grouped_matmul`. Backward keeps the codes of `x`.

    Raises:
        ValueError, TypeError, NotImplementedError: as `grouped_matmul`.
    """
    codes, slot = weight if isinstance(weight, SlottedWeight) else (weight, weight)
    if not isinstance(codes, QuantizedArray):
        codes = _codes_of(lax.stop_gradient(codes))
    values = jax.ShapeDtypeStruct(codes.shape, x.dtype)
    run_natively = check_grouped("grouped_fp8", x, values, group_sizes, implementation)
    fits = run_natively and multiplies_fp8_groups(codes.shape)
    return save_for_backward(_grouped(x, codes, slot, group_sizes, gradients, run_natively, fits, slot.dtype))


def multiplies_fp8_groups(shape: tuple[int, ...]) -> bool:
    """Says whether kernels multiply the codes of a weight `(shards, groups, part, features)` as they are: on Hopper, of
    sizes that its copies can handle."""
    shards, _, part, features = shape
    aligned = features % 16 == 0 and shards * part % 16 == 0 and (shards == 1 or part % _TILE == 0)
    return aligned and supports_grouped_fp8() and native.has("gtp_grouped_product", "CUDA")


def _codes_of(weight: jax.Array) -> QuantizedArray:
    """Returns the codes of a weight, with one scale a group."""
    values, (shards, groups, *_) = quantizable(weight), weight.shape
    amax = multi_amax([jnp.reshape(values, (shards * groups, -1))], stacked=True)
    whole = jnp.max(jnp.reshape(amax, (shards, groups)), axis=0)
    shared = jnp.broadcast_to(power_of_two_amax(whole, FP8_E4M3), (shards, groups))
    return quantize(values, FP8_E4M3, amax=shared)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def _grouped(
    x: jax.Array,
    weight: QuantizedArray,
    slot: jax.Array,
    group_sizes: jax.Array,
    gradients: Format,
    run_natively: bool,
    fits: bool,
    dtype: np.dtype,
) -> jax.Array:
    return _forward(x, weight, slot, group_sizes, gradients, run_natively, fits, dtype)[0]


def _forward(
    x: jax.Array,
    weight: QuantizedArray,
    slot: jax.Array,
    group_sizes: jax.Array,
    gradients: Format,
    run_natively: bool,
    fits: bool,
    dtype: np.dtype,
):
    del slot, gradients, dtype
    codes = _quantized(quantizable(x), FP8_E4M3, fits)
    if fits:
        y = _product(codes, weight.codes, _units(weight), group_sizes, x.dtype)
    else:
        values = values_of(codes, x.dtype), by_group(values_of(weight, x.dtype))
        y = kernels_of(run_natively).product(*values, group_sizes, transposed=True)
    return y, (codes, weight, group_sizes)


def _backward(gradients: Format, run_natively: bool, fits: bool, kind: np.dtype, saved, gradient: jax.Array):
    x, weight, group_sizes = saved
    dtype = gradient.dtype
    codes = _quantized(quantizable(gradient), gradients, fits)
    if fits:
        to_x = _product(codes, _along_out(weight.codes), _units(weight), group_sizes, dtype)
        to_weight = _outer(codes, x, group_sizes, weight.shape[0], kind)
    else:
        run = kernels_of(run_natively)
        values = values_of(codes, dtype)
        to_x = run.product(values, by_group(values_of(weight, dtype)), group_sizes, transposed=False)
        to_weight = by_shard(run.outer(values, values_of(x, dtype), group_sizes, dtype=kind), weight.shape)
    return to_x, None, to_weight, None


_grouped.defvjp(_forward, _backward)


def _quantized(rows: jax.Array, format: Format, fused: bool) -> QuantizedArray:
    if fused:
        return quantize_fused(rows, format, operand_amax(amax_fused(rows), format))
    return quantize(rows, format, amax=operand_amax(multi_amax([rows])[0], format))


def _units(weight: QuantizedArray) -> jax.Array:
    """Returns what each group's codes are multiplied with."""
    return tensor_unit(weight)[0]


def _product(
    x: QuantizedArray, kernels: jax.Array, units: jax.Array, group_sizes: jax.Array, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Returns each row of `x` times its group's codes `(shards, groups, part, in)`."""
    tiles = cut_into_tiles(group_sizes, x.codes.shape[0], _TILE)
    scales = units * tensor_unit(x)
    out = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
    y = native.grouped_product(x.codes, kernels, scales, *tiles, left_e5m2=_is_e5m2(x), right_e5m2=False, dtype=out)
    return y.astype(dtype)


def _outer(
    y: QuantizedArray, x: QuantizedArray, group_sizes: jax.Array, shards: int, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Returns the sum over each group's rows of `y[row] x[row]^T`: `(shards, groups, part, in)`."""
    tiles = cut_into_tiles(group_sizes, x.codes.shape[0], _TILE)
    # so that every group begins at a multiple of a tile, filled up with zeros; rows of no group are left out
    ends = jnp.where(tiles.group < group_sizes.shape[0], tiles.stop, tiles.start)
    left, right = (native.transpose(q.codes, tiles.start, ends, matrices=1)[0] for q in (y, x))
    sizes = jnp.bincount(tiles.group, length=group_sizes.shape[0]).astype(jnp.int32) * _TILE
    stops = jnp.cumsum(sizes, dtype=jnp.int32)
    scales = jnp.broadcast_to(tensor_unit(y) * tensor_unit(x), sizes.shape)
    out = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
    found = native.grouped_outer(
        left,
        right,
        scales,
        stops - sizes,
        stops,
        shards=shards,
        left_e5m2=_is_e5m2(y),
        right_e5m2=False,
        dtype=out,
    )
    return found.astype(dtype)


def _along_out(codes: jax.Array) -> jax.Array:
    """Maps `(shards, groups, part, in)` to `(1, groups, in, shards * part)`."""
    shards, groups, part, features = codes.shape
    if part % _TILE:
        return jnp.reshape(jnp.transpose(codes, (1, 3, 0, 2)), (1, groups, features, shards * part))
    group, shard, tile = np.mgrid[:groups, :shards, : part // _TILE]
    starts = jnp.asarray(((shard * groups + group) * part + tile * _TILE).ravel(), jnp.int32)
    return native.transpose(jnp.reshape(codes, (-1, features)), starts, starts + _TILE, matrices=groups)[None]


def _is_e5m2(q: QuantizedArray) -> bool:
    return q.format.element == "e5m2"
