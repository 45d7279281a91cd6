"""Grouped matmuls for NVIDIA GPUs, in Pallas. Each program of the grid computes one tile of the result.

The rows are first cut into tiles that are each within one group (see `Tiles`), so that no operation is spent on rows of
another group. Loads are masked, so that nothing needs to be aligned or padded.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.experimental.xla_metadata import set_xla_metadata

from ._tiles import cut_into_tiles


class Block(NamedTuple):
    """The sizes of a tile of the result and of the contraction, and the warps and stages of a program."""

    rows: int = 128
    columns: int = 256
    depth: int = 64
    warps: int = 8
    stages: int = 3


# The number of tiles of rows that one stretch of the grid processes for every column, so that both operands stay in the
# L2 cache.
_STRETCH = 8

# The assumed matmul rate on an H200, half of the datasheet's. Only XLA's scheduler uses it.
_FLOPS_PER_NS = 500_000


@functools.partial(jax.jit, static_argnames=("dtype", "transposed", "block", "interpret"))
def product(
    x: jax.Array,
    weight: jax.Array,
    group_sizes: jax.Array,
    *,
    dtype: np.dtype,
    transposed: bool,
    block: Block = Block(),  # noqa: B008  immutable
    interpret: bool = False,
) -> jax.Array:
    """Computes `product` of `GroupedMatmul`."""
    rows, depth = x.shape
    shards, groups, part, features = weight.shape
    columns = shards * part if transposed else features
    tiles = cut_into_tiles(group_sizes, rows, block.rows)
    across = pl.cdiv(columns, block.columns)
    down = tiles.group.shape[0]

    def program(group_of, start_of, stop_of, x, weight, y):
        tile, column = _place(pl.program_id(0), down, across)
        group, start, stop = group_of[tile], start_of[tile], stop_of[tile]

        row = start + jnp.arange(block.rows)
        real = row < stop
        out, has_out = _span(column, block.columns, columns)

        def write(total):
            mask = _outer_mask(total.shape, real, has_out)
            pltriton.store(y.at[row[:, None], out[None, :]], total.astype(y.dtype), mask=mask)

        @pl.when((start < stop) & (group < groups))
        def _():
            def step(i, total):
                inner, has_inner = _span(i, block.depth, depth)
                left = _load(x.at[row[:, None], inner[None, :]], real, has_inner)
                if transposed:
                    shard, line = _in_shards(out, part, shards)
                    right = _load(weight.at[shard, group, line, inner[None, :]], has_out, has_inner)
                else:
                    shard, line = _in_shards(inner, part, shards)
                    right = _load(weight.at[shard, group, line, out[None, :]], has_inner, has_out)
                return total + pltriton.dot(left, right, trans_b=transposed)

            total = jnp.zeros((block.rows, block.columns), jnp.float32)
            write(jax.lax.fori_loop(0, pl.cdiv(depth, block.depth), step, total))

        @pl.when((start < stop) & (group == groups))
        def _():
            write(jnp.zeros((block.rows, block.columns), jnp.float32))  # rows of no group

    flops = 2 * rows * columns * depth
    return _call(program, (down * across,), (rows, columns), dtype, block, flops, interpret)(*tiles, x, weight)


@functools.partial(jax.jit, static_argnames=("dtype", "shards", "block", "interpret"))
def outer(
    y: jax.Array,
    x: jax.Array,
    group_sizes: jax.Array,
    *,
    dtype: np.dtype,
    shards: int,
    block: Block = Block(),  # noqa: B008  immutable
    interpret: bool = False,
) -> jax.Array:
    """Computes `outer` of `GroupedMatmul`."""
    rows, down, across, groups = x.shape[0], y.shape[1], x.shape[1], group_sizes.shape[0]
    ends = jnp.minimum(jnp.cumsum(group_sizes, dtype=jnp.int32), rows)
    starts = jnp.append(jnp.int32(0), ends[:-1])
    wide = pl.cdiv(across, block.columns)
    high = pl.cdiv(down, block.rows)

    def program(start_of, end_of, y, x, total_of):
        group = pl.program_id(1)
        start, end = start_of[group], end_of[group]
        tile, column = _place(pl.program_id(0), high, wide)
        line, has_line = _span(tile, block.rows, down)
        out, has_out = _span(column, block.columns, across)

        def step(i, total):
            row = start + i * block.depth + jnp.arange(block.depth)
            mine = row < end
            left = _load(y.at[row[:, None], line[None, :]], mine, has_line)
            right = _load(x.at[row[:, None], out[None, :]], mine, has_out)
            return total + pltriton.dot(left, right, trans_a=True)

        total = jnp.zeros((block.rows, block.columns), jnp.float32)
        total = jax.lax.fori_loop(0, pl.cdiv(end - start, block.depth), step, total)
        mask = _outer_mask(total.shape, has_line, has_out)
        shard, line = _in_shards(line, down // shards, shards)
        pltriton.store(total_of.at[shard, group, line, out[None, :]], total.astype(total_of.dtype), mask=mask)

    grid = (high * wide, groups)
    flops = 2 * rows * down * across
    shape = (shards, groups, down // shards, across)
    return _call(program, grid, shape, dtype, block, flops, interpret)(starts, ends, y, x)


def _call(program, grid: tuple[int, ...], shape: tuple[int, ...], dtype, block: Block, flops: int, interpret: bool):
    call = pl.pallas_call(
        program,
        grid=grid,
        out_shape=jax.ShapeDtypeStruct(shape, dtype),
        compiler_params=pltriton.CompilerParams(num_warps=block.warps, num_stages=block.stages),
        interpret=interpret,
        name="grouped_matmul",
    )

    def run(*operands: jax.Array) -> jax.Array:
        # XLA's scheduler assumes that an unknown kernel takes no time, and would overlap no collective with it
        with set_xla_metadata(latency_metadata=str(1 + flops // _FLOPS_PER_NS)):
            return call(*operands)

    return run


def _place(program: jax.Array, down: int, across: int) -> tuple[jax.Array, jax.Array]:
    """Returns the row and column of the tile that a program computes. Programs cover one stretch of rows after another,
    and each stretch column by column."""
    stretch = program // (_STRETCH * across)
    first = stretch * _STRETCH
    high = jnp.minimum(down - first, _STRETCH)
    within = program - first * across
    return first + within % high, within // high


def _span(number: jax.Array, size: int, limit: int) -> tuple[jax.Array, jax.Array | None]:
    """Returns the indices of a block, and which of them are within the array; `None` if all blocks are whole."""
    index = number * size + jnp.arange(size)
    return index, None if limit % size == 0 else index < limit


def _in_shards(index: jax.Array, part: int, shards: int) -> tuple[jax.Array | int, jax.Array]:
    """Returns the shard of each row of a kernel, and the row within that shard, as columns of indices."""
    index = index[:, None]
    return (0, index) if shards == 1 else (index // part, index % part)


def _load(block, rows: jax.Array | None, columns: jax.Array | None) -> jax.Array:
    """Returns a block, with zeros where `rows` or `columns` is false."""
    mask = _outer_mask(block.shape, rows, columns)
    return pltriton.load(block) if mask is None else pltriton.load(block, mask=mask, other=0)


def _outer_mask(shape: tuple[int, ...], rows: jax.Array | None, columns: jax.Array | None) -> jax.Array | None:
    masks = [rows[:, None]] if rows is not None else []
    if columns is not None:
        masks.append(columns[None, :])
    return jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), shape) if masks else None
