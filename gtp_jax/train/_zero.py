"""When gradients are summed over the axes that divide only what is stored of a weight (ZeRO)."""

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
    """Refuses another name, and in global view what it has not.

    Raises:
        ValueError: naming what there is.
    """
    if name not in REDUCE_OVER_DP:
        raise ValueError(
            f"`reduce_over_dp` is {name!r}; it must be one of {', '.join(map(repr, REDUCE_OVER_DP))}. Take 'each' for "
            "gradients that take the least memory, 'last' for the fewest bytes between nodes."
        )
    if name == "last" and view == "global" and microbatches > 1:
        raise ValueError(
            "`reduce_over_dp` is 'last', which is for `view='local'`: in global view gradients are summed over dp in "
            "each microbatch. Take 'each', or `view='local'` if every operation of model and loss is written for it."
        )


def placeholders(params: Tree, layouts: Tree) -> Tree:
    """Returns parameters of which gradients can be taken that are not yet summed over the optimizer's axes.

    In place of what this rank stores of a weight is NaN of its whole shard's shape. What is gathered has been joined
    already, so that no layer reads it, and XLA makes no array of it; a loss that does gets no number that looks right.

    Args:
        params: this rank's.
        layouts: same structure, `Layout` or `None` leaves.
    """

    def one(x: jax.Array, layout: Layout | None) -> jax.Array:
        if layout is None or layout.copies == 1:
            return x
        return jnp.full((*x.shape[: x.ndim - len(layout.shape)], *layout.shard_shape), jnp.nan, x.dtype)

    return jax.tree.map(one, params, layouts)


def sum_shards(gradients: Tree, layouts: Tree) -> Tree:
    """Sums gradients of `placeholders` over the optimizer's axes, in their own dtype.

    Returns those of what this rank stores.
    """

    def one(g: jax.Array, layout: Layout | None) -> jax.Array:
        return g if layout is None else scatter_stored([g], [layout], g.dtype, [g.dtype])[0]

    return jax.tree.map(one, gradients, layouts)
