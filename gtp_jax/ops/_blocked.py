"""E4M3 in blocks of 128 with float32 scales: quantization, and products whose sums are promoted every 128 elements."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Float

from ..formats import FP8_BLOCKS, Format, QuantizedArray
from . import reference
from ._implementation import Implementation, runs_native, without_gradient

RUN = 128


def quantize_blocked(
    x: Float[jax.Array, "*lead rows columns"],
    format: Format,
    axis: Literal["row", "column", "both"],
    implementation: Implementation | None = None,
) -> tuple[QuantizedArray, ...]:
    """Returns the copies that `axis` asks for, as `gtp_jax.quantize` does."""
    rows, columns = axis != "column", axis != "row"
    x = without_gradient("quantize", x)
    runs_native("quantize", implementation, f"{format.name} has no kernel")
    found = []
    for part, column in [(x, False)] * rows + [(jnp.swapaxes(x, -1, -2), True)] * columns:
        codes, scales = reference.quantize_blocked(part, block=format.run)
        found.append(QuantizedArray(codes, scales, None, format, (x.shape[-2], x.shape[-1]), column))
    return tuple(found)


def blocked_product(
    a: QuantizedArray,
    b: QuantizedArray,
    dtype: jax.typing.DTypeLike,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Returns the product of codes that both have the contraction last, `a @ b.T`, in `dtype`.

    Every 128 elements, the sum is scaled and added to a float32 sum, because tensor cores of Hopper keep only some 14
    bits of a sum of FP8 products.

    Args:
        a: a copy in `FP8_BLOCKS_1D`, with codes `(M, K)`.
        b: a copy in `FP8_BLOCKS_1D` or `FP8_BLOCKS`, with codes `(N, K)`.
        dtype: the dtype of the result.
        implementation: `"reference"` or `None` multiplies float32 values; there is no kernel.

    Raises:
        NotImplementedError: if `implementation` is `"native"`.
    """
    assert a.scales is not None and b.scales is not None
    runs_native("linear_fp8_blocks", implementation, "no kernel multiplies codes in blocks of 128")
    return reference.blocked_product(a.codes, a.scales, b.codes, b.scales, dtype=dtype)


def transposed(q: QuantizedArray) -> QuantizedArray:
    """Returns the transpose of a matrix in tiles: the same codes and scales, not rounded again."""
    assert q.format == FP8_BLOCKS and q.scales is not None
    return QuantizedArray(q.codes.T, q.scales.T, None, q.format, q.matrix, columns=True)


def dequantize_blocked(
    q: QuantizedArray, dtype: jax.typing.DTypeLike, implementation: Implementation | None = None
) -> jax.Array:
    """Returns the values in logical orientation, as `gtp_jax.dequantize` does."""
    runs_native("dequantize", implementation, f"{q.format.name} has no kernel")
    codes, scales = without_gradient("dequantize", (q.codes, q.scales))
    values = reference.decode_blocked(codes, scales, block=q.format.run, dtype=jnp.dtype(dtype))
    return jnp.swapaxes(values, -1, -2) if q.columns else values
