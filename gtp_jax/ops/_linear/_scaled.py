"""Block-scaled matmuls, which hardware supports from SM100."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float32

from ...formats import QuantizedArray
from .._operand import tensor_unit

_DTYPES: dict[str | None, Any] = {
    "e2m1": jnp.float4_e2m1fn,
    "e4m3": jnp.float8_e4m3fn,
    "e5m2": jnp.float8_e5m2,
    "e8m0": jnp.float8_e8m0fnu,
}


def scaled_product(a: QuantizedArray, b: QuantizedArray) -> Float32[jax.Array, "rows columns"]:
    """Returns the float32 product of two matrices, contracted along their blocks: along the columns of a row-wise copy,
    and along the rows of a column-wise one.

    Calls `jax.nn.scaled_matmul`, which runs in cuDNN on SM100, and in operations of XLA elsewhere.
    """
    (left, left_scales), (right, right_scales) = _transposed(a), _transposed(b)
    y = jax.nn.scaled_matmul(
        left[None], right[None], left_scales[None], right_scales[None], preferred_element_type=jnp.float32
    )[0]
    for q in (a, b):
        if q.amax is not None:
            y = y * tensor_unit(q)
    return y


def fits(a: QuantizedArray) -> bool:
    """Returns whether `scaled_product` supports a matrix: it must not be empty, and its contraction must consist of
    whole blocks."""
    assert a.format.block is not None
    return min(a.matrix) > 0 and a.matrix[0 if a.columns else 1] % a.format.block[1] == 0


def _transposed(q: QuantizedArray) -> tuple[jax.Array, jax.Array]:
    """Returns the codes and the scales with the contraction last, and with the scales repeated for every row."""
    assert q.scales is not None and q.format.block is not None
    codes, scales = q.codes, q.scales
    rows, columns = reversed(q.matrix) if q.columns else q.matrix
    if q.columns and not q.format.transposed_columns:
        codes, scales = codes.T, scales.T
    values = lax.bitcast_convert_type(codes, _DTYPES[q.format.element])
    scales = jnp.repeat(scales, q.format.block[0], axis=0)[:rows]
    return jnp.reshape(values, (rows, columns)), lax.bitcast_convert_type(scales, _DTYPES[q.format.scale])
