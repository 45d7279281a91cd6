"""Chooses when gradients are summed over the axes that divide weights only in storage (ZeRO)."""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from ..layout import Layout
from ..weights import scatter_stored

Tree = Any

ReduceOverDp = Literal["each", "last"]
REDUCE_OVER_DP: tuple[ReduceOverDp, ...] = get_args(ReduceOverDp)


def check_reduce_over_dp(name: Any, view: str, microbatches: int) -> None:
    """Refuses an unknown choice, and one that global view does not support.

    Raises:
        ValueError: if the choice is refused; the message says what to use instead.
    """
    if name not in REDUCE_OVER_DP:
        raise ValueError(
            f"`reduce_over_dp` is {name!r}; it must be one of {', '.join(map(repr, REDUCE_OVER_DP))}. Use 'each' for "
            "the least memory for gradients, or 'last' for the fewest bytes between nodes."
        )
    if name == "last" and view == "global" and microbatches > 1:
        raise ValueError(
            "`reduce_over_dp` is 'last', which is for `view='local'`: in global view gradients are summed over dp in "
            "each microbatch. Use 'each', or `view='local'` if every operation of model and loss is written for it."
        )


def placeholders(params: Tree, layouts: Tree) -> Tree:
    """Returns stand-ins for parameters, whose gradients are not yet summed over the optimizer's axes.

    Each weight that these axes divide is replaced by NaN in the shape of its whole shard. No layer reads it, because
    the shards have already been joined and prepared for the gather, and XLA allocates no array for it. A loss that
    reads it gets NaN instead of a plausible number.

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
    """Sums gradients of `placeholders` over the optimizer's axes, in their own dtype.

    Returns:
        The gradients of the parts that this rank stores.
    """

    def one(g: jax.Array, layout: Layout | None) -> jax.Array:
        return g if layout is None else scatter_stored([g], [layout], g.dtype, [g.dtype])[0]

    return jax.tree.map(one, gradients, layouts)
