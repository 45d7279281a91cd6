"""The matmul of a layer of experts, of operands rounded to a recipe's formats: forward, and both of backward."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int32, UInt32

from ..formats import Format, Operands, QuantizedArray
from ._amax import hadamard_amax, multi_amax
from ._grouped_matmul import check_grouped, kernels_of
from ._implementation import Implementation
from ._operand import operand_amax, quantizable, rounded_weight, values_of
from ._quantize import quantize
from ._save import save_for_backward
from ._slot import SlottedWeight, values_and_slot
from ._tiles import in_whole_blocks


def grouped_quantized(
    x: Float[jax.Array, "rows features_in"],
    weight: Float[jax.Array, "shards groups part features_in"] | SlottedWeight,
    group_sizes: Int32[jax.Array, " groups"],
    key: UInt32[jax.Array, " 2"],
    operands: Operands,
    *,
    implementation: Implementation | None = None,
) -> Float[jax.Array, "rows features_out"]:
    """Returns `grouped_matmul` of operands rounded in blocks, as `linear_blocks` rounds a dense layer's.

    | product | operands, and along what their blocks run |
    |---|---|
    | forward | input along features in, weight as it is |
    | dgrad | gradient along features out, each group's weight along features out |
    | wgrad | gradient along rows, input along rows; both transformed if `operands.hadamard` |

    wgrad contracts the rows of one group, and no block may hold rows of two: in what it multiplies every group begins
    at a multiple of the block, filled up with zeros, which change no scale and add nothing. So a group's blocks do not
    depend on the others' sizes, and a group's kernel has the gradient that it would have by itself.

    The tensor's scale, where a format has one, is that of all rows at once: a power of two, so that a row's product
    depends on no other row, short of underflow. jax (0.11.2) has no grouped matmul of codes and scales for any
    hardware: what is multiplied are the rounded values, which bfloat16 holds exactly.

    Args:
        x: as in `grouped_matmul`; bfloat16, float16, float32, or float64, which is rounded to float32 first.
        weight: likewise, rounded to `operands.weight` already, as it travelled.
        group_sizes: likewise.
        key: uint32 `(2,)`, for stochastic rounding.
        operands: the formats, all in blocks.
        implementation: as in `grouped_matmul`.

    Returns:
        As `grouped_matmul`. Backward keeps the codes of `x`.

    Raises:
        ValueError, TypeError, NotImplementedError: as `grouped_matmul`.
    """
    values, slot = values_and_slot(weight)
    native = check_grouped("grouped_quantized", x, values, group_sizes, implementation)
    return save_for_backward(_grouped_quantized(x, values, slot, group_sizes, key, operands, native, slot.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _grouped_quantized(
    x: jax.Array,
    weight: jax.Array,
    slot: jax.Array,
    group_sizes: jax.Array,
    key: jax.Array,
    operands: Operands,
    native: bool,
    dtype: np.dtype,
) -> jax.Array:
    return _forward(x, weight, slot, group_sizes, key, operands, native, dtype)[0]


def _forward(
    x: jax.Array,
    weight: jax.Array,
    slot: jax.Array,
    group_sizes: jax.Array,
    key: jax.Array,
    operands: Operands,
    native: bool,
    dtype: np.dtype,
):
    del slot, dtype
    along_in, along_rows, _ = _copies(x, group_sizes, operands.activation, operands.hadamard)
    values = values_of(along_in, x.dtype)
    y = kernels_of(native).product(values, weight, group_sizes, transposed=True)
    return y, (along_rows, weight, group_sizes, key)


def _backward(operands: Operands, native: bool, kind: np.dtype, saved, gradient: jax.Array):
    x_rows, weight, group_sizes, key = saved
    dtype, run = gradient.dtype, kernels_of(native)
    rounding = key if operands.stochastic else None
    along_out, along_rows, sizes = _copies(gradient, group_sizes, operands.gradient, operands.hadamard, rounding)
    columns = rounded_weight(weight, operands, "column")
    kernel = values_of(columns, dtype) if isinstance(columns, QuantizedArray) else columns
    to_x = run.product(values_of(along_out, dtype), kernel, group_sizes, transposed=False)
    operands_of_sum = values_of(along_rows, dtype), values_of(x_rows, dtype)
    to_weight = run.outer(*operands_of_sum, sizes, shards=weight.shape[0], dtype=kind)
    return to_x, None, to_weight, None, None


_grouped_quantized.defvjp(_forward, _backward)


def _copies(
    x: jax.Array, group_sizes: jax.Array, form: Format, hadamard: bool, key: jax.Array | None = None
) -> tuple[QuantizedArray, QuantizedArray, jax.Array]:
    """Returns an operand in blocks along its features; and along its rows, with groups moved apart, and their sizes
    there."""
    rows = quantizable(x)
    assert form.block is not None
    apart, sizes = in_whole_blocks(rows, group_sizes, form.block[1])
    if not form.has_amax:
        return quantize(rows, form, key=key), quantize(apart, form, axis="column", key=key), sizes
    whole = multi_amax([rows])[0]
    amaxes = operand_amax(jnp.stack([whole, hadamard_amax(apart) if hadamard else whole]), form)
    return (
        quantize(rows, form, amax=amaxes[0], key=key),
        quantize(apart, form, amax=amaxes[1], axis="column", hadamard=hadamard, key=key),
        sizes,
    )
