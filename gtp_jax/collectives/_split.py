"""Gathers the parts of a dimension that tensor ranks own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Shaped

from ..layout import Split
from ._over_gloo import all_gather


def join_split(part: Shaped[jax.Array, "*own"], split: Split, dim: int) -> Shaped[jax.Array, "*whole"]:
    """Gathers all ranks' parts of a dimension, and returns the whole dimension without padding."""
    if len(split.owners) == 1:
        return part
    assert split.axis is not None
    parts = all_gather(part[None], split.axis, dim=0)
    runs = [lax.slice_in_dim(parts[rank], 0, count, axis=dim) for rank, count in enumerate(split.counts)]
    return jnp.concatenate(runs, axis=dim)
