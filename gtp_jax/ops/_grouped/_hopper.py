"""16-bit grouped matmuls on Hopper, in CUDA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ... import native
from ...mesh import supports_grouped_matmul
from ._contract import GroupedMatmul, Problem, lacks_kernels
from ._tiles import cut_into_tiles

# The number of rows of a tile of the CUDA kernels.
TILE = 128


def _product(
    x: jax.Array, weight: jax.Array, group_sizes: jax.Array, *, dtype: np.dtype, transposed: bool
) -> jax.Array:
    tiles = cut_into_tiles(group_sizes, x.shape[0], TILE)
    return native.grouped_product(x, weight, None, *tiles, backward=not transposed, dtype=dtype)


def _outer(y: jax.Array, x: jax.Array, group_sizes: jax.Array, *, dtype: np.dtype, shards: int) -> jax.Array:
    stops = jnp.minimum(jnp.cumsum(group_sizes, dtype=jnp.int32), x.shape[0])
    starts = jnp.append(jnp.int32(0), stops[:-1])
    out = dtype if dtype == x.dtype else np.dtype(np.float32)
    return native.grouped_outer(y, x, None, starts, stops, shards=shards, dtype=out).astype(dtype)


def _lacks(problem: Problem) -> str:
    return lacks_kernels(problem) or lacks_sizes(problem.shape, problem.dtype)


HOPPER = GroupedMatmul(native=True, codes=None, lacks=_lacks, product=_product, outer=_outer)


def lacks_sizes(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> str:
    """Returns why the CUDA kernels do not multiply by expert kernels `(shards, groups, part, features)` of this dtype,
    including codes in uint8; an empty string if they do: on Hopper, if the TMA supports the sizes."""
    if not (supports_grouped_matmul() and native.has("gtp_grouped_product", "CUDA")):
        return "the CUDA kernels of this library run on Hopper GPUs (compute capability 9.0)"
    shards, _, part, features = shape
    run = 16 // jnp.dtype(dtype).itemsize
    if features % run or shards * part % run or (shards > 1 and part % 8) or min(shape) == 0:
        return f"the CUDA kernels copy 16 bytes at once, and the weight has the shape {shape}"
    return ""


def result_dtype(dtype: np.dtype) -> jax.typing.DTypeLike:
    """Returns the dtype in which products of codes return a result, which is then cast to `dtype`."""
    return jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32


def along_out(codes: jax.Array) -> jax.Array:
    """Transposes the codes of expert kernels: maps `(shards, groups, part, in)` to `(1, groups, in, shards * part)`."""
    shards, groups, part, features = codes.shape
    if part % TILE:
        return jnp.reshape(jnp.transpose(codes, (1, 3, 0, 2)), (1, groups, features, shards * part))
    group, shard, tile = np.mgrid[:groups, :shards, : part // TILE]
    starts = jnp.asarray(((shard * groups + group) * part + tile * TILE).ravel(), jnp.int32)
    return native.transpose(jnp.reshape(codes, (-1, features)), starts, starts + TILE, matrices=groups)[None]
