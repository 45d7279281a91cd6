"""16-bit grouped matmuls on GPUs: CUDA kernels on Hopper, and Pallas kernels where those do not run."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np

from ... import native
from ...mesh import supports_grouped_matmul
from ._tiles import cut_into_tiles

# The number of rows of a tile of the CUDA kernels.
TILE = 128


def product(x: jax.Array, weight: jax.Array, group_sizes: jax.Array, *, transposed: bool) -> jax.Array:
    """Multiplies each row by its group's kernel `(shards, groups, part, in)`, or by the kernel's transpose if
    `transposed`, as in forward."""
    if not reads_kernels(weight.shape, x.dtype):
        return _triton().product(x, weight, group_sizes, transposed=transposed)
    tiles = cut_into_tiles(group_sizes, x.shape[0], TILE)
    return native.grouped_product(x, weight, None, *tiles, backward=not transposed, dtype=x.dtype)


def outer(y: jax.Array, x: jax.Array, group_sizes: jax.Array, *, shards: int, dtype: np.dtype) -> jax.Array:
    """Returns for each group the sum over its rows of `y[row] x[row]^T`: `(shards, groups, part, in)`, in `dtype`."""
    shape = (shards, group_sizes.shape[0], y.shape[1] // shards, x.shape[1])
    if not x.shape[0]:  # the kernel cannot copy an empty array
        return jnp.zeros(shape, dtype)
    if not reads_kernels(shape, x.dtype):
        return _triton().outer(y, x, group_sizes, shards=shards, dtype=dtype)
    stops = jnp.minimum(jnp.cumsum(group_sizes, dtype=jnp.int32), x.shape[0])
    starts = jnp.append(jnp.int32(0), stops[:-1])
    out = dtype if dtype == x.dtype else np.dtype(np.float32)
    return native.grouped_outer(y, x, None, starts, stops, shards=shards, dtype=out).astype(dtype)


def reads_kernels(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> bool:
    """Returns whether the CUDA kernels can multiply by expert kernels `(shards, groups, part, features)` of this dtype,
    including codes in uint8: on Hopper, if the TMA supports the sizes."""
    shards, _, part, features = shape
    run = 16 // jnp.dtype(dtype).itemsize
    aligned = features % run == 0 and shards * part % run == 0 and (shards == 1 or part % 8 == 0)
    return aligned and min(shape) > 0 and supports_grouped_matmul() and native.has("gtp_grouped_product", "CUDA")


def along_out(codes: jax.Array) -> jax.Array:
    """Transposes the codes of expert kernels: maps `(shards, groups, part, in)` to `(1, groups, in, shards * part)`."""
    shards, groups, part, features = codes.shape
    if part % TILE:
        return jnp.reshape(jnp.transpose(codes, (1, 3, 0, 2)), (1, groups, features, shards * part))
    group, shard, tile = np.mgrid[:groups, :shards, : part // TILE]
    starts = jnp.asarray(((shard * groups + group) * part + tile * TILE).ravel(), jnp.int32)
    return native.transpose(jnp.reshape(codes, (-1, features)), starts, starts + TILE, matrices=groups)[None]


def _triton() -> types.ModuleType:
    from . import _triton  # Pallas takes a second to import, and few GPUs need it

    return _triton
