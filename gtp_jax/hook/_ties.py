"""Ties: arrays that are not available before something else is. No value changes.

[Note: ties that hold]
XLA drops an output of a barrier that nobody reads, and the tie with it. So what must wait passes through a select on a
zero that came out of the barrier: XLA cannot know that it is zero, and must wait for it. A gather of what waits is kept
behind the select by constraining the stored partition between the two (`_movement`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def is_float(leaf: Any) -> bool:
    """Returns whether an array has a gradient."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def after(zero: jax.Array, arrays: Sequence[Any]) -> list[Any]:
    """Returns the arrays, floats among them no sooner than `zero`."""
    return [jnp.where(zero == 0, a, jnp.zeros((), a.dtype)) if _is_real(a) and is_float(a) else a for a in arrays]


def stamped(arrays: Sequence[Any]) -> tuple[jax.Array, list[Any]]:
    """Returns a zero that is available once the arrays are, and the arrays."""
    zero, *tied = together([jnp.zeros((), jnp.float32), *arrays])
    return zero, tied


def together(arrays: Sequence[Any]) -> list[Any]:
    """Returns the arrays, none of which is available before all are. Random keys and what is no array are left out."""
    found = list(arrays)
    real = [i for i, leaf in enumerate(found) if _is_real(leaf)]
    if real:
        for i, leaf in zip(real, lax.optimization_barrier([found[i] for i in real]), strict=True):
            found[i] = leaf
    return found


def _is_real(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and dtype != jax.dtypes.float0 and not jnp.issubdtype(dtype, jax.dtypes.extended)
