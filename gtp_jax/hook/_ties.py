"""Ties make arrays wait until other arrays are available. They change no value.

[Note: ties that hold]
XLA drops outputs of a barrier that nothing reads, and the tie with them. An array that must wait therefore passes
through a select on a zero that came out of the barrier: XLA cannot know that it is zero, and must wait for it. A
constraint to the stored partition between the select and the gather keeps the gather after the select (`_movement`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def is_float(leaf: Any) -> bool:
    """Returns whether an array is of an inexact dtype and thus has a gradient."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def after(zero: jax.Array, arrays: Sequence[Any]) -> list[Any]:
    """Returns the arrays; those that are floats wait for `zero`."""
    return [jnp.where(zero == 0, a, jnp.zeros((), a.dtype)) if _is_real(a) and is_float(a) else a for a in arrays]


def stamped(arrays: Sequence[Any]) -> tuple[jax.Array, list[Any]]:
    """Returns a zero that is available once all arrays are, and the arrays."""
    zero, *tied = together([jnp.zeros((), jnp.float32), *arrays])
    return zero, tied


def together(arrays: Sequence[Any]) -> list[Any]:
    """Returns the arrays, none of which is available before all are; random keys and non-arrays are not tied."""
    found = list(arrays)
    real = [i for i, leaf in enumerate(found) if _is_real(leaf)]
    if real:
        for i, leaf in zip(real, lax.optimization_barrier([found[i] for i in real]), strict=True):
            found[i] = leaf
    return found


def _is_real(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and dtype != jax.dtypes.float0 and not jnp.issubdtype(dtype, jax.dtypes.extended)
