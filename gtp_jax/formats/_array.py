"""A quantized matrix, or a stack of them: codes, block scales and amax, with their shapes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ._spec import Format


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scales", "amax"),
    meta_fields=("format", "matrix", "columns"),
)
@dataclasses.dataclass(frozen=True)
class QuantizedArray:
    """The quantized form of an array of logical shape `(*lead, M, K)`.

    A pytree. Only the arrays carry the leading dimensions, so it can be stacked, scanned over and vmapped.

    Let R x C be M x K, or K x M for a transposed column-wise copy, and b_r x b_c the format's block. These invariants
    hold:

        codes.shape  = (*lead, R, C) for 8-bit elements, (*lead, R, ceil(C / 2)) for 4-bit ones
        scales.shape = (*lead, ceil(R / b_r), ceil(C / b_c)), or None if the format has no blocks;
                       (*lead, ceil(M / b_c), K) for a column-wise copy that is not transposed
        amax.shape   = a prefix of lead, possibly (); None if the format has no amax

    `codes` and `scales` are uint8, except that inverse scales are float32; `amax` is float32. In a 4-bit row of odd
    length, the last high nibble is 0.

    Attributes:
        codes: the codes of the elements; of two 4-bit codes in a byte, the even element's is in the low nibble.
        scales: the block scales, one per block.
        amax: the largest finite magnitude of the tensor, from which its scale was computed.
        format: the number format.
        matrix: `(M, K)`, the logical shape of one matrix.
        columns: whether blocks run along M (the column-wise copy) instead of K.
    """

    codes: jax.Array
    scales: jax.Array | None
    amax: jax.Array | None
    format: Format
    matrix: tuple[int, int]
    columns: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape, `(*lead, M, K)`."""
        return (*self.codes.shape[:-2], *self.matrix)

    @property
    def nbytes(self) -> int:
        """The size of all three arrays together, in bytes."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in (self.codes, self.scales, self.amax) if leaf is not None)


def codes_shape(format: Format, matrix: tuple[int, int], columns: bool) -> tuple[int, int]:
    """Returns the shape of one matrix's codes; see `QuantizedArray`."""
    rows, cols = reversed(matrix) if columns and format.transposed_columns else matrix
    return rows, -(-cols * format.element_bits // 8)


def scales_shape(format: Format, matrix: tuple[int, int], columns: bool) -> tuple[int, int] | None:
    """Returns the shape of one matrix's block scales; see `QuantizedArray`."""
    if format.block is None:
        return None
    along_rows, along_cols = format.block
    rows, cols = reversed(matrix) if columns else matrix
    blocks = -(-rows // along_rows), -(-cols // along_cols)
    return blocks if format.transposed_columns or not columns else (blocks[1], blocks[0])


def validate(q: QuantizedArray) -> None:
    """Checks the invariants of `QuantizedArray`.

    Raises:
        TypeError: if `q` is not a `QuantizedArray`, or one of its arrays is not an array or has the wrong dtype.
        ValueError: if an array is missing or does not belong to the format, or its shape breaks an invariant.
    """
    if not isinstance(q, QuantizedArray):
        raise TypeError(f"`q` is a {type(q).__name__}; it must be a QuantizedArray, as `gtp_jax.ops.quantize` returns.")
    for name in ("codes", "scales", "amax"):
        array = getattr(q, name)
        if array is not None and not (hasattr(array, "dtype") and hasattr(array, "shape")):
            raise TypeError(
                f"`{name}` is a {type(array).__name__}; it must be an array, as `gtp_jax.ops.quantize` returns."
            )
    codes, scales = codes_shape(q.format, q.matrix, q.columns), scales_shape(q.format, q.matrix, q.columns)
    lead = () if q.codes is None else q.codes.shape[:-2]
    _expect(q, "codes", q.codes, jnp.uint8, (*lead, *codes))
    scale = jnp.float32 if q.format.scale == "float32" else jnp.uint8
    _expect(q, "scales", q.scales, scale, None if scales is None else (*lead, *scales))
    _expect(q, "amax", q.amax, jnp.float32, lead[: q.amax.ndim] if q.format.has_amax and q.amax is not None else None)


def _expect(
    q: QuantizedArray, name: str, array: Any, dtype: jax.typing.DTypeLike, shape: tuple[int, ...] | None
) -> None:
    needed = shape is not None or (name == "amax" and q.format.has_amax)
    kind = f"{'column' if q.columns else 'row'}-wise {q.format.name} matrix of shape {q.matrix}"
    if needed != (array is not None):
        raise ValueError(
            f"`{name}` is {'missing' if needed else 'not allowed'} in a {kind}; build it with `gtp_jax.ops.quantize`."
        )
    if array is None:
        return
    if array.dtype != dtype:
        raise TypeError(f"`{name}` of a {kind} is {array.dtype}; it must be {jnp.dtype(dtype)}.")
    if array.shape != shape:
        raise ValueError(f"`{name}` of a {kind} has shape {array.shape}; it must be {shape}.")
