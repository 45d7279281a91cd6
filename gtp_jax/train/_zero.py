"""Sums gradients over the optimizer's axes once per step instead of in each microbatch (`reduce_over_dp="last"`).

The optimizer's axes, by default dp, divide weights only in storage (ZeRO). Each rank stores a part of its shard, and
computes with the whole shard. This way sends the fewest bytes over these axes, such as between hosts; the other, the
default, needs less memory for gradients.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..layout import Layout
from ..weights import scatter_stored

Tree = Any


def placeholders(params: Tree, layouts: Tree) -> Tree:
    """Returns arrays of NaN to differentiate with respect to, instead of the weights that the optimizer's axes divide.

    A placeholder has the shape of a whole shard, so its gradient is that of the whole shard, not yet summed over these
    axes. No layer reads a placeholder, because the shards have already been gathered over these axes, and XLA allocates
    no array for it. If a loss reads it, the loss is NaN instead of a plausible number. Other parameters are returned
    unchanged.

    Args:
        params: the parameters that this rank stores.
        layouts: a tree of the same structure, with `Layout` or `None` leaves.
    """

    def one(x: jax.Array, layout: Layout | None) -> jax.Array:
        if layout is None or layout.copies == 1:
            return x
        return jnp.full((*x.shape[: x.ndim - len(layout.shape)], *layout.shard_shape), jnp.nan, x.dtype)

    return jax.tree.map(one, params, layouts)


def sum_shards(gradients: Tree, layouts: Tree) -> Tree:
    """Sums the gradients of `placeholders` over the optimizer's axes by reduce-scatter, in each gradient's own dtype.

    Args:
        gradients: the gradients of whole shards.
        layouts: a tree of the same structure, with `Layout` or `None` leaves.

    Returns:
        The gradients of the parts that this rank stores. Gradients of other parameters are returned unchanged.
    """

    def one(g: jax.Array, layout: Layout | None) -> jax.Array:
        return g if layout is None else scatter_stored([g], [layout], g.dtype, [g.dtype])[0]

    return jax.tree.map(one, gradients, layouts)
