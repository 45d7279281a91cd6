"""The 16 x 16 random Hadamard transform of every 16 rows of a matrix, which spreads outliers over a block."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ...formats import RUN
from . import _ieee
from ._amax import finite_amax

# The fixed signs of TransformerEngine, so that the transform is the same on every rank and in every version.
_SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.int32)


def hadamard(x: jax.Array, *, inverse: bool = False) -> jax.Array:
    """Returns `H (d * x)` for every run of 16 rows or, with `inverse`, `d * (H x)`, in bfloat16.

    H is the orthogonal Sylvester matrix (entries +-1/4), and d are the signs. H is its own inverse, so the second form
    is the inverse of the first. The transform is computed in float32 by butterflies of strides 1, 2, 4 and 8,
    multiplied by 1/4, and then rounded to bfloat16.

    Args:
        x: `(*lead, M, K)`; M is padded with zeros to a multiple of 16.

    Returns:
        `(*lead, M rounded up to 16, K)`.
    """
    bits = _ieee.widen(x)
    bits = jnp.pad(bits, [(0, 0)] * (bits.ndim - 2) + [(0, -bits.shape[-2] % RUN), (0, 0)])
    *lead, rows, cols = bits.shape
    runs = jnp.reshape(bits, (*lead, rows // RUN, RUN, cols))
    signs = jnp.where(_SIGNS < 0, _ieee.SIGN, 0)[:, None]
    runs = _butterflies(runs) ^ signs if inverse else _butterflies(runs ^ signs)
    return _ieee.narrow(jnp.reshape(_quarter(runs), bits.shape), jnp.bfloat16)


def hadamard_amax(x: jax.Array) -> jax.Array:
    """Returns the float32 amax of `hadamard(x)`."""
    return _ieee.as_float(finite_amax(_ieee.widen(hadamard(x))))


def _butterflies(runs: jax.Array) -> jax.Array:
    *lead, _, cols = runs.shape
    for stride in (1, 2, 4, 8):
        pairs = jnp.reshape(runs, (*lead, RUN // (2 * stride), 2, stride, cols))
        first, second = pairs[..., 0, :, :], pairs[..., 1, :, :]
        pairs = jnp.stack([_ieee.add(first, second), _ieee.add(first, second ^ _ieee.SIGN)], axis=-3)
        runs = jnp.reshape(pairs, runs.shape)
    return runs


def _quarter(bits: jax.Array) -> jax.Array:
    magnitude = bits & _ieee.MAGNITUDE
    significand, exponent = _ieee.split(magnitude)
    finite = _ieee.round_to_float32(significand, exponent - 2)
    return jnp.where(magnitude >= _ieee.INFINITY, magnitude, finite) | bits & _ieee.SIGN
