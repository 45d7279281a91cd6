"""16-bit grouped matmuls on all GPUs, in Pallas; see `_triton`."""

from __future__ import annotations

import types

import jax
import numpy as np

from ._contract import GroupedMatmul, lacks_kernels


def _product(
    x: jax.Array, weight: jax.Array, group_sizes: jax.Array, *, dtype: np.dtype, transposed: bool
) -> jax.Array:
    return _triton().product(x, weight, group_sizes, dtype=dtype, transposed=transposed)


def _outer(y: jax.Array, x: jax.Array, group_sizes: jax.Array, *, dtype: np.dtype, shards: int) -> jax.Array:
    return _triton().outer(y, x, group_sizes, dtype=dtype, shards=shards)


def _triton() -> types.ModuleType:
    from . import _triton  # Pallas takes a second to import, and few GPUs need it

    return _triton


PALLAS = GroupedMatmul(native=True, codes=None, lacks=lacks_kernels, product=_product, outer=_outer)
