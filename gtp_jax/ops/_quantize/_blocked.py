"""E4M3 in blocks of 128 with float32 scales: quantization, and products whose sums are promoted every 128 elements."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float

from ... import native
from ...formats import FP8_BLOCKS, FP8_BLOCKS_1D, Format, QuantizedArray
from ...mesh import platform, supports_grouped_matmul
from .. import reference
from .._implementation import Implementation, runs_native
from ._call import check_replication_is_unchecked, missing_kernel, without_gradient

RUN = 128

# The first cuBLASLt that multiplies codes in blocks of 128, that of CUDA 12.9.
_CUBLASLT = (12, 9)


def quantize_blocked(
    x: Float[jax.Array, "*lead rows columns"],
    format: Format,
    axis: Literal["row", "column", "both"],
    implementation: Implementation | None = None,
) -> tuple[QuantizedArray, ...]:
    """Returns the copies that `axis` asks for, as `gtp_jax.ops.quantize` does."""
    rows, columns = axis != "column", axis != "row"
    x = without_gradient("quantize", x)
    if runs_native("quantize", implementation, _lacks_quantize(x, format)):
        check_replication_is_unchecked("quantize", x)
        copies = _native(x, rows=rows, columns=columns)
    else:
        block = format.run
        parts = [x] * rows + [jnp.swapaxes(x, -1, -2)] * columns
        copies = [reference.quantize_blocked(part, block=block) for part in parts]
    names = [False] * rows + [True] * columns
    matrix = (x.shape[-2], x.shape[-1])
    return tuple(
        QuantizedArray(codes, scales, None, format, matrix, column)
        for (codes, scales), column in zip(copies, names, strict=True)
    )


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
        implementation: `"native"` runs on Hopper, with cuBLASLt of CUDA 12.9 or later; `"reference"` multiplies values
            in at least float32; `None` uses the best available.

    Raises:
        NotImplementedError: if `implementation` is `"native"`, and `lacks_blocked_product` gives a reason, or `dtype`
            is float64.
    """
    assert a.scales is not None and b.scales is not None
    double = "float64 has no kernel" if jnp.dtype(dtype) == jnp.float64 else ""
    if not runs_native("linear_fp8_blocks", implementation, double or lacks_blocked_product()):
        return reference.blocked_product(a.codes, a.scales, b.codes, b.scales, dtype=dtype)
    check_replication_is_unchecked("linear_fp8_blocks", (a.codes, b.codes))
    tiles = b.format == FP8_BLOCKS
    (rows, depth), columns = a.codes.shape, b.codes.shape[0]
    if 0 in (rows, depth, columns):
        return jnp.zeros((rows, columns), dtype)
    out = dtype if jnp.dtype(dtype) in (jnp.bfloat16, jnp.float32) else jnp.float32
    # a run of padding has the codes 0, so the scale of the padding does not matter
    left, left_scales = _whole(a.codes), _padded(a.scales.T, 1, RUN)
    right = _whole(b.codes)
    right_scales = _padded(b.scales, 1, 4) if tiles else _padded(b.scales.T, 1, RUN)
    found = native.blocked_product(left, left_scales, right, right_scales, tiles=tiles, dtype=out)
    return found[:rows, :columns].astype(dtype)


def lacks_blocked_product() -> str:
    """Returns why products in blocks of 128 run as the reference on the mesh in scope; an empty string if they run on
    tensor cores."""
    if not supports_grouped_matmul():
        return "only Hopper GPUs (compute capability 9.0) multiply codes in blocks of 128"
    if not native.has("gtp_blocked_product", "CUDA"):
        return native.describe()
    # programs that are compiled for absent GPUs run with a library that nobody knows
    if jax.default_backend() == "gpu" and (found := native.cublaslt_version()) < _CUBLASLT:
        return f"products in blocks of 128 need cuBLASLt 12.9 or later, and JAX has {'.'.join(map(str, found))}"
    return ""


def transposed(q: QuantizedArray) -> QuantizedArray:
    """Returns the transpose of a matrix in tiles: the same codes and scales, not rounded again."""
    assert q.format == FP8_BLOCKS and q.scales is not None
    return QuantizedArray(q.codes.T, q.scales.T, None, q.format, q.matrix, columns=True)


def dequantize_blocked(
    q: QuantizedArray, dtype: jax.typing.DTypeLike, implementation: Implementation | None = None
) -> jax.Array:
    """Returns the values in logical orientation, as `gtp_jax.ops.dequantize` does."""
    runs_native("dequantize", implementation, f"{q.format.name} has no kernel")
    codes, scales = without_gradient("dequantize", (q.codes, q.scales))
    values = reference.decode_blocked(codes, scales, block=q.format.run, dtype=jnp.dtype(dtype))
    return jnp.swapaxes(values, -1, -2) if q.columns else values


def _lacks_quantize(x: jax.Array, format: Format) -> str:
    if platform() != "gpu":
        return "there are kernels for GPUs only"
    if format != FP8_BLOCKS_1D:
        return f"{format.name} has no kernel"
    if x.ndim != 2 or 0 in x.shape:
        return "the kernel takes one matrix that is not empty"
    return missing_kernel("quantize_runs")


def _native(x: jax.Array, *, rows: bool, columns: bool) -> list[tuple[jax.Array, jax.Array]]:
    m, k = x.shape
    row, row_scales, column, column_scales = native.quantize_runs(_whole(x), rows=rows, columns=columns)
    found = [(row[:m, :k], row_scales.T[:m, : -(-k // RUN)])] if rows else []
    return found + ([(column[:k, :m], column_scales.T[:k, : -(-m // RUN)])] if columns else [])


def _whole(x: jax.Array) -> jax.Array:
    """Pads a matrix with zeros to whole blocks of 128 in both dimensions."""
    return _padded(_padded(x, 0, RUN), 1, RUN)


def _padded(x: jax.Array, axis: int, run: int) -> jax.Array:
    more = -x.shape[axis] % run
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, more if i == axis else 0, 0) for i in range(x.ndim)]) if more else x
