"""Copies rows by index."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int32, Shaped

from ... import native
from ...mesh import platform, runs_kernels

_BYTES = 16  # the number of bytes that the kernel for GPUs copies at once


def take(
    x: Shaped[jax.Array, "rows features"],
    index: Int32[jax.Array, " places"],
    real: Bool[jax.Array, " places"] | None = None,
) -> Shaped[jax.Array, "places features"]:
    """Returns the row of `x` for each place.

    On GPUs, a kernel copies rows whose size is a multiple of 16 bytes, because XLA's gathers of rows take at least 1.5
    times as long (H200, jax 0.11.2). The kernel has no gradient.

    Args:
        x: the rows, of any dtype.
        index: the row of each place, which must be in range.
        real: which places have a row; the others get zeros. All have one by default.
    """
    if platform() == "gpu" and runs_kernels() and _whole(x) and native.has("gtp_take", "CUDA"):
        return native.take(x, index if real is None else jnp.where(real, index, -1))
    return x[index] if real is None else jnp.where(real[:, None], x[index], 0)


def _whole(x: jax.Array) -> bool:
    return x.shape[1] * x.dtype.itemsize % _BYTES == 0 and x.shape[0] > 0
