"""Calls the kernels for codes in blocks of 128: CUDA only.

Their references are `quantize_blocked` and `blocked_product` of `gtp_jax.ops.reference`, whose scales are transposed
and not padded.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ._calls import NOTHING, call
from ._grouped_calls import multiply

# The memory that cuBLASLt may use for partial sums, as much as is recommended for Hopper.
_WORKSPACE_BYTES = 32 * 2**20


def quantize_runs(x: jax.Array, *, rows: bool, columns: bool) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Quantizes a matrix to e4m3 in runs of 128 along its rows, along its columns, or both.

    Args:
        x: `(M, K)`, float32, bfloat16 or float16. Both sizes are multiples of 128.
        rows, columns: which copies to make.

    Returns:
        Row codes, uint8 `(M, K)`, and the inverses of their scales, float32 `(K / 128, M)`; column codes, `(K, M)`, and
        theirs, `(M / 128, K)`. Those that are not requested have shape `(0,)`.
    """
    m, k = x.shape

    def copy(rows: int, cols: int) -> list[jax.ShapeDtypeStruct]:
        codes, scales = (rows, cols), (cols // 128, rows)
        return [jax.ShapeDtypeStruct(codes, jnp.uint8), jax.ShapeDtypeStruct(scales, jnp.float32)]

    results = [*(copy(m, k) if rows else [NOTHING] * 2), *(copy(k, m) if columns else [NOTHING] * 2)]
    return tuple(call("gtp_quantize_runs", results, [x], "sequential", rows=rows, columns=columns))


def blocked_product(
    left: jax.Array,
    left_scales: jax.Array,
    right: jax.Array,
    right_scales: jax.Array,
    *,
    tiles: bool,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Returns `left @ right.T` of e4m3 codes, with sums promoted to float32 every 128 elements. Hopper only, with
    cuBLASLt of CUDA 12.9 or later.

    Args:
        left: codes `(rows, depth)`. All sizes are multiples of 128.
        left_scales: float32 `(depth / 128, rows)`, the inverses of the scales of its runs.
        right: codes `(columns, depth)`.
        right_scales: float32, the inverses of its scales: `(depth / 128, columns)` for runs. For tiles, they are
            `(columns / 128, width)`, where width is `depth / 128` rounded up to a multiple of 4.
        tiles: whether `right` has a scale for each tile of 128 x 128, instead of each run.
        dtype: the dtype of the result, bfloat16 or float32.
    """
    (rows, depth), columns = left.shape, right.shape[0]
    results = [
        jax.ShapeDtypeStruct((rows, columns), dtype),
        jax.ShapeDtypeStruct((_WORKSPACE_BYTES,), jnp.uint8),
    ]
    operands = [left, left_scales, right, right_scales]
    return multiply("gtp_blocked_product", results, operands, rows * columns * depth, tiles=tiles)[0]
