"""Checks whether a run can continue from a state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...mesh import of_all_processes


def state_is_finite(state: Any) -> bool:
    """Returns whether all floating-point numbers of a state are finite. Every process must call this; all get the same
    answer."""
    floats = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    found = _all_finite(floats).addressable_shards
    finite = all(bool(shard.data) for shard in found)  # a process may hold no part of the state
    return bool(np.all(of_all_processes(np.bool_(finite))))


@jax.jit
def _all_finite(arrays: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.isfinite(array).all() for array in arrays]).all()
