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
from .._operand import quantizable, values_of
from .._quantize import multi_amax, power_of_two_amax, quantize
from .._save import save_for_backward
from .._slot import SlottedRows, SlottedWeight, depends_on, refuse_second_derivative
from ._contract import GroupedMatmul, Problem
from ._expand import Window, add_up
from ._hopper import TILE
from ._matmul import check_grouped
from ._row_codes import amax_of_rows, at_places, rounded_rows
from ._table import pick
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
    check_grouped(rows, codes, group_sizes)
    run = pick("grouped_fp8", implementation, Problem(codes.shape, rows.shape[0], rows.dtype, FP8_E4M3))
    if isinstance(x, SlottedRows):
        if x.codes.format != FP8_E4M3:
            raise ValueError(f"`x` is codes of {x.codes.format}; this product multiplies codes of {FP8_E4M3}.")
        of_rows = x.codes
    else:
        alone = quantizable(lax.stop_gradient(x))
        of_rows = depends_on(_rounded(alone, FP8_E4M3, alone, run), x)
    product = _Product(gradients, run, slot.dtype)
    return save_for_backward(_grouped(rows, slot, of_rows, codes, group_sizes, (taken, summed), product))


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
        run: what multiplies codes, or their values.
        dtype: the dtype of the weight's gradient.
    """

    gradients: Format
    run: GroupedMatmul
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
    dtype, run, (taken, summed) = rows.dtype, product.run, windows
    now, kernel, _ = refuse_second_derivative("grouped_fp8", (x, weight, rows))
    there = at_places(now, taken)
    operands = run.operand(there, dtype), run.operand(kernel, dtype)
    y = run.product(*operands, group_sizes, dtype=dtype, transposed=True)
    return y if summed is None else add_up(y, summed), (x, weight, group_sizes, windows)


def _backward(product: _Product, saved, gradient: jax.Array):
    x, weight, group_sizes, (taken, summed) = saved
    x, weight, gradient = refuse_second_derivative("grouped_fp8", (x, weight, gradient))
    dtype, run = gradient.dtype, product.run
    rows = quantizable(gradient)
    # for rows without a place, some transports deliver values of another rank
    counted = rows if summed is None else jnp.where(summed.chosen[:, None], rows, 0)
    codes = _rounded(rows, product.gradients, counted, run)
    there = run.operand(at_places(codes, summed), dtype)
    if run.codes:
        to_x = run.product(there, weight, group_sizes, dtype=dtype, transposed=False)
        left, right, group_sizes = _in_columns((codes, summed), (x, taken), group_sizes)
    else:
        left, right = there, values_of(at_places(x, taken), dtype)
        to_x = run.product(there, values_of(weight, dtype), group_sizes, dtype=dtype, transposed=False)
    to_weight = run.outer(left, right, group_sizes, dtype=product.dtype, shards=weight.shape[0])
    return to_x if taken is None else add_up(to_x, taken), to_weight, None, None, None, None


_grouped.defvjp(_forward, _backward)


def _rounded(rows: jax.Array, format: Format, counted: jax.Array, run: GroupedMatmul) -> QuantizedArray:
    """Returns the codes of rows, whose scale is set by the amax of `counted`. If codes are multiplied, they are made by
    operations that XLA may fuse with those that compute the rows."""
    fused = run.codes is not None
    return rounded_rows(rows, format, amax_of_rows(counted, fused), fused)


def _in_columns(
    left: _Places, right: _Places, group_sizes: jax.Array
) -> tuple[QuantizedArray, QuantizedArray, jax.Array]:
    """Returns the codes at all places as `outer` of `GroupedMatmul` takes them, and the sizes of their groups, padding
    included."""
    (y, at_y), (x, at_x) = left, right
    index = [None if window is None else window.rows for window in (at_y, at_x)]
    count = x.codes.shape[0] if index[1] is None else index[1].shape[0]
    tiles = cut_into_tiles(group_sizes, count, TILE)
    # Every group begins at a multiple of a tile, and is padded with zeros. Rows that belong to no group are left out.
    ends = jnp.where(tiles.group < group_sizes.shape[0], tiles.stop, tiles.start)
    columns = (
        native.transpose(q.codes, tiles.start, ends, matrices=1, index=rows)[0]
        for q, rows in zip((y, x), index, strict=True)
    )
    of_y, of_x = (
        QuantizedArray(codes, None, q.amax, q.format, (codes.shape[1], codes.shape[0]), columns=True)
        for q, codes in zip((y, x), columns, strict=True)
    )
    return of_y, of_x, jnp.bincount(tiles.group, length=group_sizes.shape[0]).astype(jnp.int32) * TILE
