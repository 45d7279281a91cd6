"""The matmul of a layer of experts in FP8: forward, dgrad and wgrad."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float, Int32

from ... import native
from ...formats import FP8_E4M3, Format, QuantizedArray
from .._implementation import Implementation
from .._operand import quantizable, tensor_unit, values_of
from .._quantize import multi_amax, power_of_two_amax, quantize
from .._save import save_for_backward
from .._slot import SlottedRows, SlottedWeight, depends_on, refuse_second_derivative
from ._expand import Window, add_up
from ._hopper import TILE, along_out, reads_kernels
from ._matmul import check_grouped, kernels_of
from ._row_codes import amax_of_rows, at_places, rounded_rows
from ._tiles import cut_into_tiles


def grouped_fp8(
    x: Float[jax.Array, "rows features_in"] | SlottedRows,
    weight: Float[jax.Array, "shards groups part features_in"] | SlottedWeight,
    group_sizes: Int32[jax.Array, " groups"],
    gradients: Format,
    *,
    taken: Window | None = None,
    summed: Window | None = None,
    implementation: Implementation | None = None,
) -> Float[jax.Array, "results features_out"]:
    """Returns `grouped_matmul` of operands rounded to FP8, each scaled by its own amax, as `linear_fp8` rounds them.

    The input and the incoming gradient each have one scale for all rows; the weight has one scale per group. Scales are
    powers of two, so the product of a row does not depend on other rows, except for underflow.

    On Hopper, kernels multiply the codes themselves, if they support the dtype of `x` and the sizes. Products are then
    exact, and added with at least 14 bits, as in cuBLASLt's fast accumulation. Otherwise, the same numbers are
    multiplied in the dtype of `x`.

    If a row has several places (`taken`, `summed`), it is rounded once, and its codes are moved to those places. The
    input of forward and wgrad is therefore what `rows_in_codes` makes of a token, whether the token was sent or not.
    The same holds for gradients.

    Args:
        x: as in `grouped_matmul`, in bfloat16, float16, float32, or float64, which is rounded to float32 first; or the
            codes of `rows_in_codes`, whose gradient goes to their slot.
        weight: as in `grouped_matmul`. With a slot, it can also be the codes in which the weight was sent: E4M3,
            row-wise, with one scale per group.
        group_sizes: as in `grouped_matmul`.
        gradients: the format of the incoming gradient, `FP8_E5M2` or `FP8_E4M3`.
        taken: the places at which rows of `x` are multiplied; by default, each row is multiplied once, in order.
        summed: the places that are summed to each row of the result, as in `sum_of_places`; by default, each place is
            a row.
        implementation: as in `grouped_matmul`.

    Returns:
        The result, as in `grouped_matmul`. The codes of `x` are saved for backward.

    Raises:
        ValueError, TypeError, NotImplementedError: as in `grouped_matmul`. ValueError also if `x` is codes of another
            format than `FP8_E4M3`.
    """
    codes, slot = weight if isinstance(weight, SlottedWeight) else (weight, weight)
    if not isinstance(codes, QuantizedArray):
        codes = depends_on(_codes_of(lax.stop_gradient(codes)), slot)
    rows = x.slot if isinstance(x, SlottedRows) else x
    values = jax.ShapeDtypeStruct(codes.shape, rows.dtype)
    run_natively = check_grouped("grouped_fp8", rows, values, group_sizes, implementation)
    fits = run_natively and rows.shape[0] > 0 and multiplies_fp8_groups(codes.shape)
    if isinstance(x, SlottedRows):
        if x.codes.format != FP8_E4M3:
            raise ValueError(f"`x` is codes of {x.codes.format}; this product multiplies codes of {FP8_E4M3}.")
        of_rows = x.codes
    else:
        alone = quantizable(lax.stop_gradient(x))
        of_rows = depends_on(rounded_rows(alone, FP8_E4M3, amax_of_rows(alone, fits), fits), x)
    product = _Product(gradients, run_natively, fits, slot.dtype)
    return save_for_backward(_grouped(rows, slot, of_rows, codes, group_sizes, (taken, summed), product))


def multiplies_fp8_groups(shape: tuple[int, ...]) -> bool:
    """Returns whether kernels multiply the codes of a weight `(shards, groups, part, features)` directly."""
    return reads_kernels(shape, jnp.uint8)


def _codes_of(weight: jax.Array) -> QuantizedArray:
    """Returns the codes of a weight, with one scale per group."""
    values, (shards, groups, *_) = quantizable(weight), weight.shape
    amax = multi_amax([jnp.reshape(values, (shards * groups, -1))], stacked=True)
    whole = jnp.max(jnp.reshape(amax, (shards, groups)), axis=0)
    shared = jnp.broadcast_to(power_of_two_amax(whole, FP8_E4M3), (shards, groups))
    return quantize(values, FP8_E4M3, amax=shared)


# The codes of rows, and the places at which they are multiplied; `None` if each row is its own place.
_Places = tuple[QuantizedArray, Window | None]


class _Product(NamedTuple):
    """How to compute the products.

    Attributes:
        gradients: the format of incoming gradients.
        run_natively: whether native kernels multiply values.
        fits: whether native kernels multiply codes.
        dtype: the dtype of the weight's gradient.
    """

    gradients: Format
    run_natively: bool
    fits: bool
    dtype: np.dtype


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _grouped(
    rows: jax.Array,
    slot: jax.Array,
    x: QuantizedArray,
    weight: QuantizedArray,
    group_sizes: jax.Array,
    windows: tuple[Window | None, Window | None],
    product: _Product,
) -> jax.Array:
    return _forward(rows, slot, x, weight, group_sizes, windows, product)[0]


def _forward(
    rows: jax.Array,
    slot: jax.Array,
    x: QuantizedArray,
    weight: QuantizedArray,
    group_sizes: jax.Array,
    windows: tuple[Window | None, Window | None],
    product: _Product,
):
    del slot
    dtype, (taken, summed) = rows.dtype, windows
    now, kernel, _ = refuse_second_derivative("grouped_fp8", (x, weight, rows))
    there = at_places(now, taken)
    if product.fits:
        y = _product(there, kernel.codes, _units(kernel), group_sizes, dtype)
    else:
        values = values_of(there, dtype), values_of(kernel, dtype)
        y = kernels_of(product.run_natively).product(*values, group_sizes, transposed=True)
    return y if summed is None else add_up(y, summed), (x, weight, group_sizes, windows)


def _backward(product: _Product, saved, gradient: jax.Array):
    x, weight, group_sizes, (taken, summed) = saved
    x, weight, gradient = refuse_second_derivative("grouped_fp8", (x, weight, gradient))
    dtype = gradient.dtype
    rows = quantizable(gradient)
    # for rows without a place, some transports deliver values of another rank
    counted = rows if summed is None else jnp.where(summed.chosen[:, None], rows, 0)
    codes = rounded_rows(rows, product.gradients, amax_of_rows(counted, product.fits), product.fits)
    there = at_places(codes, summed)
    if product.fits:
        to_x = _product(there, along_out(weight.codes), _units(weight), group_sizes, dtype)
        to_weight = _outer((codes, summed), (x, taken), group_sizes, weight.shape[0], product.dtype)
    else:
        run = kernels_of(product.run_natively)
        values, of_x = values_of(there, dtype), values_of(at_places(x, taken), dtype)
        to_x = run.product(values, values_of(weight, dtype), group_sizes, transposed=False)
        to_weight = run.outer(values, of_x, group_sizes, shards=weight.shape[0], dtype=product.dtype)
    return to_x if taken is None else add_up(to_x, taken), to_weight, None, None, None, None


_grouped.defvjp(_forward, _backward)


def _units(weight: QuantizedArray) -> jax.Array:
    """Returns the factor of each group's codes, `(groups,)`."""
    return tensor_unit(weight)[0]


def _product(
    x: QuantizedArray, kernels: jax.Array, units: jax.Array, group_sizes: jax.Array, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Multiplies each row of `x` by its group's codes `(shards, groups, part, in)`."""
    tiles = cut_into_tiles(group_sizes, x.codes.shape[0], TILE)
    scales = units * tensor_unit(x)
    out = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
    y = native.grouped_product(x.codes, kernels, scales, *tiles, left_e5m2=_is_e5m2(x), right_e5m2=False, dtype=out)
    return y.astype(dtype)


def _outer(
    left: _Places, right: _Places, group_sizes: jax.Array, shards: int, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Returns for each group the sum over its places of `y[place] x[place]^T`: `(shards, groups, part, in)`."""
    (y, at_y), (x, at_x) = left, right
    index = [None if window is None else window.rows for window in (at_y, at_x)]
    count = x.codes.shape[0] if index[1] is None else index[1].shape[0]
    tiles = cut_into_tiles(group_sizes, count, TILE)
    # Every group begins at a multiple of a tile, and is padded with zeros. Rows that belong to no group are left out.
    ends = jnp.where(tiles.group < group_sizes.shape[0], tiles.stop, tiles.start)
    codes_of_y, codes_of_x = (
        native.transpose(q.codes, tiles.start, ends, matrices=1, index=rows)[0]
        for q, rows in zip((y, x), index, strict=True)
    )
    sizes = jnp.bincount(tiles.group, length=group_sizes.shape[0]).astype(jnp.int32) * TILE
    stops = jnp.cumsum(sizes, dtype=jnp.int32)
    scales = jnp.broadcast_to(tensor_unit(y) * tensor_unit(x), sizes.shape)
    out = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
    found = native.grouped_outer(
        codes_of_y,
        codes_of_x,
        scales,
        stops - sizes,
        stops,
        shards=shards,
        left_e5m2=_is_e5m2(y),
        right_e5m2=False,
        dtype=out,
    )
    return found.astype(dtype)


def _is_e5m2(q: QuantizedArray) -> bool:
    return q.format.element == "e5m2"
