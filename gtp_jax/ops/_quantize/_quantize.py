"""Quantizes arrays, and dequantizes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jaxtyping import Float, Key, UInt32

from ..._random_keys import is_key, key_words
from ...formats import FP8_BLOCKS, FP8_BLOCKS_1D, NVFP4, NVFP4_1D, RUN, Format, QuantizedArray, validate
from .._implementation import Implementation
from ._blocked import dequantize_blocked, quantize_blocked
from ._call import call
from ._checks import as_amax, as_matrix, check_dtype, check_format

_AXES = ("row", "column", "both")
_Amax = jax.typing.ArrayLike | Sequence[jax.typing.ArrayLike | None] | None
_Key = Key[jax.Array, ""] | UInt32[jax.Array, " 2"]


@overload
def quantize(
    x: Float[jax.Array, "... columns"],
    format: Format,
    *,
    amax: _Amax = None,
    axis: Literal["row", "column"] = "row",
    hadamard: bool = False,
    key: _Key | None = None,
    implementation: Implementation | None = None,
) -> QuantizedArray: ...


@overload
def quantize(
    x: Float[jax.Array, "... columns"],
    format: Format,
    *,
    amax: _Amax = None,
    axis: Literal["both"],
    hadamard: bool = False,
    key: _Key | None = None,
    implementation: Implementation | None = None,
) -> tuple[QuantizedArray, QuantizedArray]: ...


def quantize(
    x: Float[jax.Array, "... columns"],
    format: Format,
    *,
    amax: _Amax = None,
    axis: Literal["row", "column", "both"] = "row",
    hadamard: bool = False,
    key: _Key | None = None,
    implementation: Implementation | None = None,
) -> QuantizedArray | tuple[QuantizedArray, ...]:
    """Quantizes an array to one of `gtp_jax.formats`, row-wise, column-wise, or both in one pass over it.

    The formulas are TransformerEngine's, bit for bit on finite input (`gtp_jax/formats/README.md`). Unlike in
    TransformerEngine, NaN and Inf are dequantized to NaN, and affect no other block. In NVFP4 and MXFP8, their whole
    block becomes NaN. In NVFP4, an amax above FLT_MAX / 448 = 7.5955e35 can turn finite numbers into Inf. A stack of
    matrices has one amax, unless `amax` has leading dimensions or the call is vmapped.

    Do not call this on a sharded array outside `jax.shard_map`: XLA would silently gather the operands of the kernel.

    Args:
        x: `(*lead, M, K)` or `(K,)`, float32, bfloat16 or float16.
        format: the number format, such as `gtp_jax.formats.NVFP4`.
        amax: the largest finite magnitude to scale by, float32, of shape `()` or a prefix of the leading dimensions;
            if `axis` is `"both"`, optionally a pair, for the row-wise and the column-wise copy. `None` computes it.
            Formats without an amax require `None`.
        axis: `"row"` for blocks along K; `"column"` for blocks along M, with transposed codes if the format transposes
            them; `"both"` for both copies. With FP8, `"both"` is the cast and transpose that the operands of matmuls
            need.
        hadamard: whether to transform the column-wise copy first (`NVFP4_1D` only). Its amax is then that of the
            transformed array, and its M is rounded up to a multiple of 16. `dequantize` returns the transformed array,
            and `gtp_jax.ops.hadamard(..., inverse=True)` transforms it back.
        key: a key for stochastic rounding (NVFP4 only), a JAX key of two words or uint32 `(2,)`. A new key causes no
            recompilation. Rounding is unbiased except for elements above 6 times their block scale, which saturate:
            the scale is rounded to the nearest e4m3, so the largest element of a block may be up to 1/16 above.
        implementation: `"reference"`, `"native"`, or `None` for the best available.

    Returns:
        A `QuantizedArray`; if `axis` is `"both"`, a pair of the row-wise and the column-wise one.

    Raises:
        TypeError: if `x`, `format`, `amax` or `key` has the wrong type or dtype, or the call is differentiated.
        ValueError: if `x` is a scalar, `amax` or `key` has the wrong shape, or `format` or `axis` is not compatible
            with `amax`, `hadamard` or `key`.
        NotImplementedError: if `implementation` is `"native"`, and there is no kernel for these arguments on the
            current platform.
    """
    check_format(format, (FP8_BLOCKS, FP8_BLOCKS_1D))
    x = as_matrix("x", x)
    if axis not in _AXES:
        raise ValueError(f"`axis` is {axis!r}; it must be one of {list(_AXES)}.")
    rows, columns = axis != "column", axis != "row"
    if hadamard and (format != NVFP4_1D or not columns):
        raise ValueError(
            f"`hadamard` applies only to the column-wise copy of NVFP4_1D; this is {format.name} with axis {axis!r}. "
            "Leave it out, or transform the array with `gtp_jax.ops.hadamard`."
        )
    if key is not None and format not in (NVFP4, NVFP4_1D):
        raise ValueError(f"`key` asks for stochastic rounding, which {format.name} does not support; leave it out.")

    amax_rows, amax_columns = _amaxes(x, format, amax, axis, hadamard, implementation)
    if format.scale == "float32":
        copies = quantize_blocked(x, format, axis, implementation)
        return copies if axis == "both" else copies[0]
    row_codes, row_scales, column_codes, column_scales = call(
        "quantize",
        implementation,
        x,
        amax_rows,
        amax_columns,
        jnp.zeros(2, jnp.uint32) if key is None else _words(key),
        format=format,
        hadamard=hadamard,
        stochastic=key is not None,
        rows=rows,
        columns=columns,
    )

    def wrap(codes: jax.Array, scales: jax.Array, amax: jax.Array, matrix: tuple[int, int], columns: bool):
        kept_scales = None if format.block is None else scales
        return QuantizedArray(codes, kept_scales, amax if format.has_amax else None, format, matrix, columns)

    m, k = x.shape[-2:]
    padded = -(-m // RUN) * RUN if hadamard else m
    made = []
    if rows:
        made.append(wrap(row_codes, row_scales, amax_rows, (m, k), False))
    if columns:
        made.append(wrap(column_codes, column_scales, amax_columns, (padded, k), True))
    return tuple(made) if axis == "both" else made[0]


def dequantize(
    q: QuantizedArray, dtype: jax.typing.DTypeLike = jnp.bfloat16, *, implementation: Implementation | None = None
) -> Float[jax.Array, "*lead rows columns"]:
    """Returns the values of a quantized array, in logical orientation.

    Computes `code * scale` in float32, then rounds to `dtype`; for MXFP8, the result is exact in bfloat16. A Hadamard
    transform is not undone.

    Args:
        q: a row-wise or column-wise quantized array.
        dtype: the dtype of the result: float32, bfloat16 or float16.
        implementation: as in `quantize`.

    Returns:
        `(*lead, M, K)`.

    Raises:
        TypeError: if `q` is not a `QuantizedArray`, `dtype` is not one of these dtypes, or the call is differentiated.
        ValueError: if `q` breaks an invariant of its type.
        NotImplementedError: as in `quantize`.
    """
    validate(q)
    dtype = check_dtype("dtype", dtype)
    if q.format.scale == "float32":
        return dequantize_blocked(q, dtype, implementation)
    return call(
        "dequantize",
        implementation,
        q.codes,
        jnp.zeros(0, jnp.uint8) if q.scales is None else q.scales,
        jnp.zeros((), jnp.float32) if q.amax is None else q.amax,
        format=q.format,
        columns=q.columns,
        shape=q.shape,
        dtype=dtype,
    )


def _amaxes(
    x: jax.Array, format: Format, amax: _Amax, axis: str, hadamard: bool, implementation: Implementation | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the amaxes of the row-wise and the column-wise copy; 0 for a copy that has none or is not made."""
    unused = jnp.zeros((), jnp.float32)
    if not format.has_amax:
        if amax is not None:
            raise ValueError(f"`amax` is given, but {format.name} has only block scales; leave it out.")
        return unused, unused
    lead = x.shape[:-2]
    if amax is None:
        whole = (
            call("multi_amax", implementation, [x], stacked=False)[0] if axis != "column" or not hadamard else unused
        )
        return whole, call("hadamard_amax", implementation, x) if hadamard else whole
    if isinstance(amax, tuple | list):
        if axis != "both" or len(amax) != 2:
            raise ValueError(
                f"`amax` is a sequence of {len(amax)}, and `axis` is {axis!r}; pass a pair with axis 'both': "
                "the amax of the row-wise copy, then that of the column-wise copy."
            )
        return as_amax(amax[0], lead), as_amax(amax[1], lead)
    if axis == "both" and hadamard:
        raise ValueError(
            "`amax` is a single amax, but the Hadamard transform changes the amax of the column-wise copy. "
            "Pass a pair: `multi_amax([x])[0]` and `hadamard_amax(x)`, each over all shards of x."
        )
    both = as_amax(amax, lead)
    return both, both


def _words(key: Any) -> jax.Array:
    words = key_words(key) if is_key(key) else key
    if getattr(words, "dtype", None) != jnp.uint32:
        raise TypeError(
            f"`key` is {getattr(words, 'dtype', type(key).__name__)}; it must be a JAX key, or two uint32 words."
        )
    if words.shape != (2,):
        raise ValueError(
            f"`key` has words of shape {words.shape}; it must have two words. Make it with "
            "`jax.random.key(seed, impl='threefry2x32')`."
        )
    return jnp.asarray(words)
