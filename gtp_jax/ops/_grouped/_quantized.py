"""The matmul of a layer of experts with operands rounded to a recipe's formats: forward, dgrad and wgrad."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int32, UInt32

from ...formats import FP8_BLOCKS, FP8_BLOCKS_1D, Format, Operands, QuantizedArray
from .._implementation import Implementation
from .._operand import operand_amax, quantizable, rounded_weight, values_of
from .._order import Order, by_kernels, by_parts, in_whole_tiles, padded_shape
from .._quantize import RUN, hadamard_amax, multi_amax, quantize
from .._save import save_for_backward
from .._slot import SlottedRows, SlottedWeight, refuse_second_derivative, values_and_slot
from ._contract import GroupedMatmul, Problem
from ._expand import Window, add_up, expand
from ._matmul import check_grouped
from ._row_codes import at_places, rows_in_codes
from ._table import pick
from ._tiles import in_whole_blocks

# [Note: tiles of experts]
# Expert kernels in tiles have codes `(shards, groups, part, in)`, and scales `(groups, ceil(shards * part / 128),
# ceil(in / 128))`: tiles begin at every 128th row of a group's kernel, and shards may cut them.


def grouped_quantized(
    x: Float[jax.Array, "rows features_in"] | SlottedRows,
    weight: Float[jax.Array, "shards groups part features_in"] | SlottedWeight,
    group_sizes: Int32[jax.Array, " groups"],
    key: UInt32[jax.Array, " 2"],
    operands: Operands,
    *,
    taken: Window | None = None,
    order: Order | None = None,
    implementation: Implementation | None = None,
) -> Float[jax.Array, "places features_out"]:
    """Returns `grouped_matmul` of operands rounded in blocks, as `linear_blocks` rounds those of a dense layer.

    | product | operands, and the dimension along which their blocks run |
    |---|---|
    | forward | input along features in, weight as it was sent |
    | dgrad | gradient along features out, each group's weight along features out |
    | wgrad | gradient along rows, input along rows; both transformed if `operands.hadamard` |

    wgrad contracts the rows of one group, and no block may hold rows of two groups. In its operands, every group
    therefore begins at a multiple of the block, and is padded with zeros, which change no scale and add nothing to a
    sum. So the blocks of a group do not depend on the sizes of other groups.

    If a row has several places (`taken`), and `operands.rounds_input_once`, it is rounded before it is moved, and its
    codes are moved to the places. wgrad's input is then made from the values of these codes, whether the row was sent
    or not.

    If a format has a scale of the tensor, it is shared by all rows. It is a power of two, so the product of a row does
    not depend on other rows, except for underflow. jax (0.11.2) has no grouped matmul of codes and scales for any
    hardware, so the rounded values are multiplied. bfloat16 represents them exactly if scales are powers of two. Sums
    are in at least float32. On Hopper, kernels of this library multiply the codes of `FP8_BLOCKS` themselves, if the
    weight is passed as codes and the kernels support the sizes; they promote sums to float32 every 128 elements.

    Args:
        x: as in `grouped_matmul`, in bfloat16, float16, float32, or float64, which is rounded to float32 first; or the
            codes of `rows_in_codes`, whose gradient goes to their slot.
        weight: as in `grouped_matmul`, already rounded to `operands.weight`, as it was sent. With a slot, it can also
            be the codes in which it was sent, if these are of `FP8_BLOCKS`, row-wise, with tiles as in
            [Note: tiles of experts].
        group_sizes: as in `grouped_matmul`.
        key: uint32 `(2,)`, for stochastic rounding.
        operands: the formats, which must all have blocks.
        taken: the places at which rows of `x` are multiplied; by default, each row is multiplied once, in order.
        order: the order of the rows of codes of several kernels, `(1, groups, rows of kernels, in)`; `None` if tiles
            begin at every 128th row. The features out and the slot are in the order of parts.
        implementation: as in `grouped_matmul`.

    Returns:
        The result, as in `grouped_matmul`. Codes of `x` are saved for backward: those of forward if `x` is codes or was
        rounded before it was moved to its places, otherwise those of wgrad.

    Raises:
        ValueError, TypeError, NotImplementedError: as in `grouped_matmul`. ValueError also if `x` is codes of another
            format than `operands.activation`, or of a format that is not rounded once; or if `weight` is codes of
            another format than `FP8_BLOCKS` or has scales of another shape, or comes with an `order` and is no codes.
    """
    kernels, slot = _kernels_and_slot(weight, operands, order)
    if isinstance(x, SlottedRows):
        if x.codes.format != operands.activation or not operands.rounds_input_once:
            raise ValueError(
                f"`x` is codes of {x.codes.format}, and the operands are {operands.activation}"
                + ("." if operands.rounds_input_once else ", whose wgrad is computed from the rows themselves.")
                + " Pass the rows, or codes of a format that is rounded once (`operands.rounds_input_once`)."
            )
    elif taken is not None:
        if operands.rounds_input_once:
            x = rows_in_codes(x, operands.activation)
        else:
            x, taken = expand(x, taken), None
    rows, codes = (x.slot, x.codes) if isinstance(x, SlottedRows) else (x, None)
    check_grouped(rows, kernels, group_sizes)
    form = kernels.format if isinstance(kernels, QuantizedArray) else None
    problem = Problem(padded_shape(kernels.shape, order), rows.shape[0], rows.dtype, form)
    run = pick("grouped_quantized", implementation, problem)
    # the gradient of values has the features of the slot, without the padding of kernels
    of_slot = problem._replace(shape=slot.shape, codes=None)
    wgrad = run if run.codes else pick("grouped_quantized", implementation, of_slot)
    product = _Product(operands, run, wgrad, slot.shape[0], slot.dtype, order)
    return save_for_backward(_grouped_quantized(rows, codes, kernels, slot, group_sizes, key, taken, product))


def _kernels_and_slot(
    weight: jax.Array | SlottedWeight, operands: Operands, order: Order | None
) -> tuple[jax.Array | QuantizedArray, jax.Array]:
    """Returns what is multiplied, an array or codes in tiles, and the array that receives the gradient."""
    if not isinstance(weight, SlottedWeight) or not isinstance(weight.values, QuantizedArray):
        if order is not None:
            raise ValueError("`order` is that of codes, and `weight` is no codes. Pass codes, or leave `order` out.")
        return values_and_slot(weight)
    codes = weight.values
    if not codes.format == operands.weight == FP8_BLOCKS:
        raise ValueError(
            f"`weight` is codes of {codes.format}, and the weight's format is {operands.weight}; only codes of "
            f"{FP8_BLOCKS} are multiplied. Pass their values: `gtp_jax.ops.dequantize(codes, dtype)`."
        )
    assert codes.scales is not None
    found, grid = codes.scales.shape, _grid_of(padded_shape(codes.shape, order))
    if found != grid:
        raise ValueError(f"`weight` {codes.shape} has scales {found}; those of its tiles are {grid}.")
    return codes, weight.slot


class _Product(NamedTuple):
    """How to compute the products.

    Attributes:
        operands: the formats.
        run: what computes forward and dgrad.
        wgrad: what computes wgrad.
        shards: the number of shards of the weight's gradient.
        dtype: the dtype of the weight's gradient.
        order: the order of the features out, as in `grouped_quantized`.
    """

    operands: Operands
    run: GroupedMatmul
    wgrad: GroupedMatmul
    shards: int
    dtype: np.dtype
    order: Order | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def _grouped_quantized(
    rows: jax.Array,
    codes: QuantizedArray | None,
    weight: jax.Array | QuantizedArray,
    slot: jax.Array,
    group_sizes: jax.Array,
    key: jax.Array,
    taken: Window | None,
    product: _Product,
) -> jax.Array:
    return _forward(rows, codes, weight, slot, group_sizes, key, taken, product)[0]


def _forward(
    rows: jax.Array,
    codes: QuantizedArray | None,
    weight: jax.Array | QuantizedArray,
    slot: jax.Array,
    group_sizes: jax.Array,
    key: jax.Array,
    taken: Window | None,
    product: _Product,
):
    del slot
    operands = product.operands
    rows, now = refuse_second_derivative("grouped_quantized", (rows, codes))
    if codes is None:
        along_in, kept, _ = _copies(rows, group_sizes, operands.activation, operands.hadamard)
    else:
        along_in, kept = at_places(now, taken), codes
    y = _multiplied(along_in, weight, group_sizes, product, rows.dtype, transposed=True)
    y = y if product.order is None else by_parts(y, product.order)
    return y, (kept, weight, group_sizes, key, taken)


def _backward(product: _Product, saved, gradient: jax.Array):
    kept, weight, group_sizes, key, taken = saved
    kept, weight, gradient = refuse_second_derivative("grouped_quantized", (kept, weight, gradient))
    operands, dtype = product.operands, gradient.dtype
    rounding = key if operands.stochastic else None
    along_out, along_rows, sizes = _copies(
        gradient, group_sizes, operands.gradient, operands.hadamard, rounding, order=product.order
    )
    if not isinstance(weight, QuantizedArray):
        columns = rounded_weight(weight, operands, "column")
        weight = values_of(columns, dtype) if isinstance(columns, QuantizedArray) else columns
    to_x = _multiplied(along_out, weight, group_sizes, product, dtype, transposed=False)
    x_rows = kept if kept.columns else _along_rows(at_places(kept, taken), group_sizes, dtype)
    wgrad = product.wgrad
    sides = wgrad.operand(along_rows, dtype), wgrad.operand(x_rows, dtype)
    to_weight = wgrad.outer(*sides, sizes, dtype=product.dtype, shards=product.shards)
    return to_x if taken is None else add_up(to_x, taken), None, None, to_weight, None, None, None


_grouped_quantized.defvjp(_forward, _backward)


def _multiplied(
    x: QuantizedArray,
    weight: jax.Array | QuantizedArray,
    group_sizes: jax.Array,
    product: _Product,
    dtype: jax.typing.DTypeLike,
    *,
    transposed: bool,
) -> jax.Array:
    """Multiplies each row by its group's kernel, or by the kernel's transpose if `transposed`, as in forward. Features
    out are in the order of codes."""
    run = product.run
    if isinstance(weight, QuantizedArray):
        kernels = in_whole_tiles(weight, product.order)
        weight = kernels if run.codes else _values_of_tiles(kernels, dtype)
    return run.product(run.operand(x, dtype), weight, group_sizes, dtype=dtype, transposed=transposed)


def _copies(
    x: jax.Array,
    group_sizes: jax.Array,
    form: Format,
    hadamard: bool,
    key: jax.Array | None = None,
    *,
    order: Order | None = None,
) -> tuple[QuantizedArray, QuantizedArray, jax.Array]:
    """Returns an operand in blocks along its features, which are in the order of kernels if one is given; the operand
    in blocks along its rows, with groups moved apart; and the sizes of these groups, padding included."""
    rows = quantizable(x)
    assert form.block is not None
    apart, sizes = in_whole_blocks(rows, group_sizes, form.block[1])
    if not form.has_amax:
        rows = rows if order is None else by_kernels(rows, order)
        return quantize(rows, form, key=key), quantize(apart, form, axis="column", key=key), sizes
    whole = multi_amax([rows])[0]
    amaxes = operand_amax(jnp.stack([whole, hadamard_amax(apart) if hadamard else whole]), form)
    return (
        quantize(rows, form, amax=amaxes[0], key=key),
        quantize(apart, form, amax=amaxes[1], axis="column", hadamard=hadamard, key=key),
        sizes,
    )


def _along_rows(x: QuantizedArray, group_sizes: jax.Array, dtype: jax.typing.DTypeLike) -> QuantizedArray:
    """Rounds the values of codes again, in blocks along the rows, with groups moved apart."""
    assert x.format.block is not None
    apart, _ = in_whole_blocks(quantizable(values_of(x, dtype)), group_sizes, x.format.block[1])
    return quantize(apart, x.format, axis="column")


def _grid_of(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Returns the shape of the scales of expert kernels `(shards, groups, part, in)`; see [Note: tiles of experts]."""
    shards, groups, part, features = shape
    return groups, -(-shards * part // RUN), -(-features // RUN)


def _values_of_tiles(kernels: QuantizedArray, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns the values of expert kernels in tiles, `(shards, groups, part, in)`; see [Note: tiles of experts]."""
    assert kernels.scales is not None
    shards, groups, part, _ = kernels.codes.shape
    rows = jnp.repeat(kernels.scales, RUN, axis=1)[:, : shards * part]
    scales = jnp.moveaxis(jnp.reshape(rows, (groups, shards, part, rows.shape[-1])), 1, 0)
    # each row gets the scales of its tiles, as if they were those of runs in `FP8_BLOCKS_1D`
    return values_of(QuantizedArray(kernels.codes, scales, None, FP8_BLOCKS_1D, kernels.matrix), dtype)
