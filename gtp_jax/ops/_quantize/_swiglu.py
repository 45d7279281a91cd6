"""SwiGLU of a fused gate and up projection, and its gradient, as FP8 codes.

On GPUs, one launch finds an amax and another writes codes. Both read only the operands of SwiGLU: neither its result
nor its gradient is stored. Elsewhere, both are computed and quantized.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32

from ... import native
from ...formats import FP8_E4M3, Format, QuantizedArray
from ...mesh import platform
from .._implementation import Implementation, runs_native
from ._amax import multi_amax
from ._call import check_replication_is_unchecked, missing_kernel, without_gradient
from ._checks import as_values
from ._quantize import quantize


def swiglu(gate_up: Float[jax.Array, "rows columns"], parts: int = 1) -> Float[jax.Array, "rows hidden"]:
    """Returns `silu(gate) * up`.

    Args:
        gate_up: `(rows, parts * 2 * width)`, the output of a fused gate and up projection. Each part has `width`
            features of the gate, then `width` of up.
        parts: the number of parts; that of the ranks whose shards a gather has concatenated, or 1.

    Returns:
        `(rows, parts * width)`, of the same dtype.
    """
    _check(gate_up, parts)
    rows, columns = gate_up.shape
    gate, up = jnp.split(jnp.reshape(gate_up, (rows, parts, columns // parts)), 2, axis=-1)
    return jnp.reshape(jax.nn.silu(gate) * up, (rows, columns // 2))


def swiglu_amax(
    gate_up: Float[jax.Array, "rows columns"],
    parts: int = 1,
    gradient: Float[jax.Array, "rows hidden"] | None = None,
    *,
    implementation: Implementation | None = None,
) -> Float32[jax.Array, ""]:
    """Returns the amax of `swiglu(gate_up, parts)`; if `gradient` is given, that of the gradient of `gate_up`.

    Args:
        gate_up: as in `swiglu`, float32, bfloat16 or float16.
        parts: as in `swiglu`.
        gradient: the gradient of the result of `swiglu`, of its shape and dtype.
        implementation: as in `multi_amax`. Codes and amaxes of both implementations may differ where the sigmoids do
            in their last bits.

    Raises:
        NotImplementedError: if `implementation` is `"native"`, and there is no kernel for the current platform.
    """
    _check(gate_up, parts, gradient)
    if _runs_native("swiglu_amax", implementation, gate_up):
        return native.swiglu_amax(*without_gradient("swiglu_amax", (gate_up, gradient)), parts=parts)
    found = swiglu(gate_up, parts) if gradient is None else _gradient(gate_up, parts, gradient)
    return multi_amax([found])[0]


def quantize_swiglu(
    gate_up: Float[jax.Array, "rows columns"],
    amax: Float32[jax.Array, ""],
    parts: int = 1,
    *,
    implementation: Implementation | None = None,
) -> QuantizedArray:
    """Returns the row-wise E4M3 codes of `swiglu(gate_up, parts)`, scaled by `amax`. See `swiglu_amax`."""
    _check(gate_up, parts)
    if not _runs_native("quantize_swiglu", implementation, gate_up):
        return quantize(swiglu(gate_up, parts), FP8_E4M3, amax=amax)
    gate_up, amax = without_gradient("quantize_swiglu", (gate_up, amax))
    codes = native.swiglu_quantize(gate_up, amax, parts=parts, format=FP8_E4M3)
    rows, hidden = codes.shape
    return QuantizedArray(codes, None, amax, FP8_E4M3, (rows, hidden))


def quantize_swiglu_gradient(
    gate_up: Float[jax.Array, "rows columns"],
    gradient: Float[jax.Array, "rows hidden"],
    amax: Float32[jax.Array, ""],
    gradient_amax: Float32[jax.Array, ""],
    format: Format,
    parts: int = 1,
    *,
    implementation: Implementation | None = None,
) -> tuple[QuantizedArray, QuantizedArray, QuantizedArray]:
    """Returns all operands that backward of an MLP makes from `gate_up` and the gradient of `swiglu(gate_up, parts)`,
    in one pass. See `swiglu_amax`.

    Args:
        gate_up: as in `swiglu`.
        gradient: the gradient of the result of `swiglu`.
        amax: the amax that scales the result of `swiglu`.
        gradient_amax: the amax that scales the gradient of `gate_up`.
        format: the format of the gradient's codes, `FP8_E5M2` or `FP8_E4M3`.
        parts: as in `swiglu`.

    Returns:
        The column-wise E4M3 codes of `swiglu(gate_up, parts)`, and the row-wise and column-wise codes of the gradient
        of `gate_up`.
    """
    _check(gate_up, parts, gradient)
    if not _runs_native("quantize_swiglu_gradient", implementation, gate_up):
        hidden = quantize(swiglu(gate_up, parts), FP8_E4M3, amax=amax, axis="column")
        found = _gradient(gate_up, parts, gradient)
        return hidden, *quantize(found, format, amax=(gradient_amax, gradient_amax), axis="both")
    operands = without_gradient("quantize_swiglu_gradient", (gate_up, gradient, amax, gradient_amax))
    codes = native.swiglu_quantize_gradient(*operands, parts=parts, format=FP8_E4M3, gradient_format=format)
    rows, hidden = gradient.shape
    return (
        QuantizedArray(codes[0], None, amax, FP8_E4M3, (rows, hidden), columns=True),
        QuantizedArray(codes[1], None, gradient_amax, format, (rows, 2 * hidden)),
        QuantizedArray(codes[2], None, gradient_amax, format, (rows, 2 * hidden), columns=True),
    )


def _check(gate_up: jax.Array, parts: int, gradient: jax.Array | None = None) -> None:
    as_values("gate_up", gate_up)
    if gate_up.ndim != 2 or parts < 1 or gate_up.shape[1] % (2 * parts):
        raise ValueError(
            f"`gate_up` has shape {gate_up.shape}, and `parts` is {parts}; the shape must be (rows, parts * 2 * width)."
        )
    hidden = (gate_up.shape[0], gate_up.shape[1] // 2)
    if gradient is not None and (gradient.shape != hidden or gradient.dtype != gate_up.dtype):
        raise ValueError(
            f"`gradient` is {gradient.dtype} of shape {gradient.shape}; it must be that of `swiglu(gate_up, parts)`, "
            f"{gate_up.dtype} of shape {hidden}."
        )


def _gradient(gate_up: jax.Array, parts: int, gradient: jax.Array) -> jax.Array:
    return jax.vjp(functools.partial(swiglu, parts=parts), gate_up)[1](gradient)[0]


def _runs_native(operation: str, implementation: Implementation | None, gate_up: jax.Array) -> bool:
    missing = missing_kernel("swiglu_amax") if platform() == "gpu" else "there are kernels for GPUs only"
    if not runs_native(operation, implementation, missing):
        return False
    check_replication_is_unchecked(operation, gate_up)
    return True
