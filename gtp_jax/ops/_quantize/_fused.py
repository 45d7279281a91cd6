"""Quantizes arrays to FP8 with operations that XLA may fuse with those that compute the array.

XLA decides for each shape whether to fuse them. For a SwiGLU of 131,072 rows and 768 features, it writes only codes,
and reads the products twice; for 32,768 rows and 4096 features, it writes the output once, in float32 (jax 0.12.0.1,
H200).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float

from ...formats import Format, QuantizedArray
from ..reference._minifloat import NAN_CODE

_DTYPES = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


def quantize_fused(x: Float[jax.Array, "rows columns"], format: Format, amax: jax.Array) -> QuantizedArray:
    """Returns the row-wise copy of `quantize(x, format, amax=amax)`, bit for bit on GPUs. On CPUs, the results differ
    for subnormal float32 numbers, which CPUs treat as 0.

    Args:
        x: bfloat16, float16 or float32.
        format: an FP8 format with a single scale.
        amax: float32 `()`, as in `quantize`.
    """
    largest = format.largest
    usable = (amax > 0) & jnp.isfinite(amax)
    factor = jnp.where(usable, jnp.minimum(largest / jnp.where(usable, amax, 1.0), jnp.finfo(jnp.float32).max), 1.0)
    scaled = jnp.clip(x.astype(jnp.float32) * factor, -largest, largest)
    codes = lax.bitcast_convert_type(scaled.astype(_DTYPES[format.element]), jnp.uint8)
    return QuantizedArray(jnp.where(jnp.isfinite(x), codes, NAN_CODE), None, amax, format, (x.shape[0], x.shape[1]))


def amax_fused(x: Float[jax.Array, "rows columns"]) -> Float[jax.Array, ""]:
    """Returns `multi_amax([x])[0]`, the largest finite magnitude."""
    return jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0), initial=0).astype(jnp.float32)
