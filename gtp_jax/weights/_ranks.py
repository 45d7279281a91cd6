"""Values that differ from rank to rank, as global arrays: every rank's own, one after another along a dimension.

So what a rank has gathered, or a gradient that is not summed yet, passes through code that sees global arrays, and
costs no device more than its own part. A module that opens a `shard_map` finds there what it would find in local view.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..formats import QuantizedArray
from ..mesh import current_view, use_loss_counted_once

Tree = Any


def ranks_spec(*, stacked: bool = False) -> PartitionSpec:
    """Returns the partition of such arrays: their first dimension; the second, if the first counts layers."""
    axes = jax.sharding.get_abstract_mesh().axis_names
    return PartitionSpec(None, axes) if stacked else PartitionSpec(axes)


def on_ranks(function: Callable[..., Tree], into: Any, out: Any) -> Callable[..., Tree]:
    """Returns `function`, called on every rank's own part.

    Args:
        function: written for local view.
        into: partitions of its arguments, a tuple; pytree prefixes.
        out: partitions of what it returns.
    """

    def local(*args: Tree) -> Tree:
        with use_loss_counted_once():
            return function(*map(of_rank, args))

    return jax.shard_map(local, in_specs=into, out_specs=out, check_vma=False)


def in_view(function: Callable[..., Tree], into: Callable[..., Any], out: Any = None) -> Callable[..., Tree]:
    """Returns a function that is written for local view, for the view in scope: in global view it is called on every
    rank's own part.

    Args:
        function: written for local view.
        into: returns the partitions of its arguments in global view, given these: a tuple, of pytree prefixes.
        out: partitions of what it returns, or a function that returns them, given what it returns (abstract arrays).
            `None`: values of every rank's own, see `by_rank`.
    """
    if current_view() != "global":
        return function
    ranks = ranks_spec()

    def in_global_view(*args: Tree) -> Tree:
        if out is None:
            return on_ranks(lambda *own: by_rank(function(*own)), into(*args), ranks)(*args)
        found = out(jax.eval_shape(on_ranks(function, into(*args), ranks), *args)) if callable(out) else out
        return on_ranks(function, into(*args), found)(*args)

    return in_global_view


def of_rank(tree: Tree) -> Tree:
    """Returns values as a rank has them, from its part of global arrays: the scale of codes is a scalar again."""
    return jax.tree.map(_of_rank, tree, is_leaf=_is_quantized)


def by_rank(tree: Tree) -> Tree:
    """Returns a rank's values as its part of such global arrays, whose partition is `ranks_spec`: scalars get a
    dimension."""
    return jax.tree.map(lambda leaf: leaf if leaf.ndim else leaf[None], tree)


def _of_rank(value: Any) -> Any:
    if not isinstance(value, QuantizedArray) or value.amax is None or value.format.block is not None:
        return value
    if value.codes.ndim > 2:
        return value  # stored codes of a stack's layers or of experts, each with its own
    return QuantizedArray(value.codes, None, jnp.reshape(value.amax, ()), value.format, value.matrix, value.columns)


def _is_quantized(value: Any) -> bool:
    return isinstance(value, QuantizedArray)
