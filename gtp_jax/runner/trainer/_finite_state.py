"""Checks whether a run can continue from a state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...mesh import is_on_host, of_all_processes, on_device


def state_is_finite(state: Any) -> bool:
    """Returns whether all floating-point numbers of a state are finite. Every process must call this; all get the same
    answer."""
    floats = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    away = [[leaf] for leaf in floats if is_on_host(leaf)]  # one at a time: the device may lack room for all
    near = [leaf for leaf in floats if not is_on_host(leaf)]
    finite = [_here(_all_finite(arrays)) for arrays in (near, *away) if arrays]
    return bool(np.all(of_all_processes(np.bool_(all(finite)))))


@jax.jit
def _all_finite(arrays: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.isfinite(array).all() for array in on_device(arrays)]).all()


def _here(found: jax.Array) -> bool:
    """Waits for a truth value that is replicated; true in a process that holds no part of the state."""
    return all(bool(shard.data) for shard in found.addressable_shards)
