"""Calls the handlers of SwiGLU and its gradient, which exist only for GPUs. Sigmoids are computed in float32; otherwise
results are those of `gtp_jax.ops.swiglu` and its gradient, quantized."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ..formats import Format
from ._calls import call


def swiglu_amax(gate_up: jax.Array, gradient: jax.Array | None, *, parts: int) -> jax.Array:
    """Returns the amax of hidden; if the gradient of hidden is given, that of the gradient of `gate_up`.

    Args:
        gate_up: `(rows, parts * 2 * width)`.
        gradient: `(rows, parts * width)`, of the same dtype.
        parts: as in `gtp_jax.ops.swiglu`.
    """
    given = jnp.zeros((0,), gate_up.dtype) if gradient is None else gradient
    result = jax.ShapeDtypeStruct((), jnp.float32)
    attributes = {"parts": np.int64(parts), "backward": gradient is not None}
    return call("gtp_swiglu_amax", result, [gate_up, given], "sequential", **attributes)


def swiglu_quantize(gate_up: jax.Array, amax: jax.Array, *, parts: int, format: Format) -> jax.Array:
    """Returns the row-wise codes of hidden, `(rows, parts * width)`."""
    rows, columns = gate_up.shape
    result = jax.ShapeDtypeStruct((rows, columns // 2), jnp.uint8)
    attributes = {"format": np.int32(format.code), "parts": np.int64(parts)}
    return call("gtp_swiglu_quantize", result, [gate_up, amax], "sequential", **attributes)


def swiglu_quantize_gradient(
    gate_up: jax.Array,
    gradient: jax.Array,
    amax: jax.Array,
    gradient_amax: jax.Array,
    *,
    parts: int,
    format: Format,
    gradient_format: Format,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the column-wise codes of hidden, `(parts * width, rows)`, and the row-wise and column-wise codes of the
    gradient of `gate_up`."""
    rows, columns = gate_up.shape
    shapes = ((columns // 2, rows), (rows, columns), (columns, rows))
    return tuple(
        call(
            "gtp_swiglu_quantize_gradient",
            [jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in shapes],
            [gate_up, gradient, amax, gradient_amax],
            "sequential",
            format=np.int32(format.code),
            gradient_format=np.int32(gradient_format.code),
            parts=np.int64(parts),
        )
    )
