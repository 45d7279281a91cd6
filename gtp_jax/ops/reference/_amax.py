"""The largest finite magnitude. NaN and Inf are ignored, so that they spoil only their own block."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from . import _ieee


def multi_amax(arrays: Sequence[jax.Array], *, stacked: bool) -> jax.Array:
    """Returns the float32 amax of each array or, if `stacked`, of each index of its first dimension; 0 if it is
    empty."""
    amaxes = [jnp.zeros((0,), jnp.int32)]
    for x in arrays:
        bits = _ieee.widen(x)
        amaxes.append(finite_amax(bits, tuple(range(1, x.ndim))) if stacked else finite_amax(bits)[None])
    return _ieee.as_float(jnp.concatenate(amaxes))


def finite_amax(bits: jax.Array, axis: tuple[int, ...] | None = None) -> jax.Array:
    """Returns the bits of the amax. The bit patterns of magnitudes have the same order as integers."""
    magnitude = bits & _ieee.MAGNITUDE
    return jnp.max(jnp.where(magnitude < _ieee.INFINITY, magnitude, 0), axis=axis, initial=0)


def any_non_finite(bits: jax.Array, axis: tuple[int, ...]) -> jax.Array:
    """Returns whether NaN or Inf is among the bit patterns."""
    return jnp.any((bits & _ieee.MAGNITUDE) >= _ieee.INFINITY, axis=axis)
