"""Views of a matrix as blocks, and packed nibbles."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def to_blocks(x: jax.Array, block: tuple[int, int]) -> jax.Array:
    """Maps `(*lead, R, C)` to `(*lead, blocks down, block rows, blocks across, block columns)`, padded with zeros."""
    *lead, rows, cols = x.shape
    widths = [(0, 0)] * len(lead) + [(0, -rows % block[0]), (0, -cols % block[1])]
    down, across = -(-rows // block[0]), -(-cols // block[1])
    return jnp.reshape(jnp.pad(x, widths), (*lead, down, block[0], across, block[1]))


def from_blocks(x: jax.Array, matrix: tuple[int, ...]) -> jax.Array:
    """Returns the inverse of `to_blocks`: the padding is cut off."""
    *lead, down, rows, across, cols = x.shape
    return jnp.reshape(x, (*lead, down * rows, across * cols))[..., : matrix[0], : matrix[1]]


def over_blocks(scales: jax.Array) -> jax.Array:
    """Reshapes one scale per block, `(*lead, blocks down, blocks across)`, to broadcast against `to_blocks`."""
    # without the barrier XLA would recompute the scale for each element of the block
    return lax.optimization_barrier(scales)[..., :, None, :, None]


def over_matrices(amax: jax.Array, ndim: int) -> jax.Array:
    """Appends dimensions of size 1 to an amax, so that it broadcasts against an array of `ndim` dimensions."""
    return jnp.reshape(amax, (*amax.shape, *(1,) * (ndim - amax.ndim)))


def pack_nibbles(codes: jax.Array) -> jax.Array:
    """Packs pairs of 4-bit codes into bytes, with the even one in the low nibble. A row of odd length ends with a high
    nibble of 0."""
    even = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, codes.shape[-1] % 2)])
    return even[..., 0::2] | even[..., 1::2] << 4


def unpack_nibbles(codes: jax.Array, cols: int) -> jax.Array:
    """Returns the inverse of `pack_nibbles`, for rows of `cols` elements."""
    pairs = jnp.stack([codes & 0xF, codes >> 4], axis=-1)
    return jnp.reshape(pairs, (*codes.shape[:-1], 2 * codes.shape[-1]))[..., :cols]
