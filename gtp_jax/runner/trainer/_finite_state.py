"""Whether a state is one that a run could go on from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...mesh import of_all_processes


def state_is_finite(state: Any) -> bool:
    """Returns whether every number of a state is finite, the same in all processes."""
    floats = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    found = _all_finite(floats).addressable_shards
    finite = all(bool(shard.data) for shard in found)  # a process may have no part of the state
    return bool(np.all(of_all_processes(np.bool_(finite))))


@jax.jit
def _all_finite(arrays: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.isfinite(array).all() for array in arrays]).all()
