"""Grouped matmuls of FP8 codes on Hopper, in CUDA, with one scale for all rows and one for each group of the weight."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ... import native
from ...formats import FP8_E4M3, QuantizedArray
from .._operand import tensor_unit
from ._contract import GroupedMatmul, Problem, lacks_kernels
from ._hopper import TILE, along_out, lacks_sizes, result_dtype
from ._tiles import cut_into_tiles


def _product(
    x: QuantizedArray, weight: QuantizedArray, group_sizes: jax.Array, *, dtype: np.dtype, transposed: bool
) -> jax.Array:
    codes = weight.codes if transposed else along_out(weight.codes)
    units = tensor_unit(weight)[0]  # of each group, as all shards have the same
    tiles = cut_into_tiles(group_sizes, x.codes.shape[0], TILE)
    scales = units * tensor_unit(x)
    kinds = dict(left_e5m2=_is_e5m2(x), right_e5m2=False)
    return native.grouped_product(x.codes, codes, scales, *tiles, **kinds, dtype=result_dtype(dtype)).astype(dtype)


def _outer(y: QuantizedArray, x: QuantizedArray, group_sizes: jax.Array, *, dtype: np.dtype, shards: int) -> jax.Array:
    stops = jnp.cumsum(group_sizes, dtype=jnp.int32)
    scales = jnp.broadcast_to(tensor_unit(y) * tensor_unit(x), group_sizes.shape)
    operands = y.codes, x.codes, scales, stops - group_sizes, stops
    kinds = dict(left_e5m2=_is_e5m2(y), right_e5m2=False)
    return native.grouped_outer(*operands, **kinds, shards=shards, dtype=result_dtype(dtype)).astype(dtype)


def _is_e5m2(q: QuantizedArray) -> bool:
    return q.format.element == "e5m2"


def _lacks(problem: Problem) -> str:
    return lacks_kernels(problem) or lacks_sizes(problem.shape, jnp.uint8)


HOPPER_FP8 = GroupedMatmul(native=True, codes=FP8_E4M3, lacks=_lacks, product=_product, outer=_outer)


def multiplies_fp8_groups(shape: tuple[int, ...]) -> bool:
    """Returns whether kernels multiply the codes of a weight `(shards, groups, part, features)` directly."""
    return not lacks_sizes(shape, jnp.uint8)
