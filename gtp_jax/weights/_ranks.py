"""Represents values that differ from rank to rank as global arrays: all ranks' values, concatenated along a dimension.

Gathered weights and gradients that are not summed yet can thus pass through code that sees global arrays, and each
device holds only its own part. A module that opens a `shard_map` gets the same values inside as in local view.
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
    """Returns the partition spec of such arrays, which shards the first dimension over all mesh axes; with `stacked`,
    the second, because the first is that of layers."""
    axes = jax.sharding.get_abstract_mesh().axis_names
    return PartitionSpec(None, axes) if stacked else PartitionSpec(axes)


def on_ranks(function: Callable[..., Tree], into: Any, out: Any) -> Callable[..., Tree]:
    """Returns a function of global arrays that calls `function` on every rank's own part.

    Args:
        function: a function written for local view.
        into: the partitions of its arguments, a tuple of pytree prefixes.
        out: the partitions of its result.
    """

    def local(*args: Tree) -> Tree:
        with use_loss_counted_once():
            return function(*map(of_rank, args))

    return jax.shard_map(local, in_specs=into, out_specs=out, check_vma=False)


def in_view(function: Callable[..., Tree], into: Callable[..., Any], out: Any = None) -> Callable[..., Tree]:
    """Adapts a function written for local view to the view in scope: in global view, it is called on every rank's own
    part.

    Args:
        function: a function written for local view.
        into: a function that takes the arguments and returns their partitions in global view, a tuple of pytree
            prefixes.
        out: the partitions of the result, or a function that takes the result (abstract arrays) and returns its
            partitions. `None` if the result differs from rank to rank; see `by_rank`.
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
    """Returns a rank's values in local form, from its part of global arrays: the amax of codes is a scalar again."""
    return jax.tree.map(_of_rank, tree, is_leaf=_is_quantized)


def by_rank(tree: Tree) -> Tree:
    """Returns a rank's values as its part of global arrays with the partition `ranks_spec`: scalars get a dimension."""
    return jax.tree.map(lambda leaf: leaf if leaf.ndim else leaf[None], tree)


def _of_rank(value: Any) -> Any:
    if not isinstance(value, QuantizedArray) or value.amax is None or value.format.block is not None:
        return value
    if value.codes.ndim > 2:
        return value  # stored codes of stacked layers or of experts, which have one amax each
    return QuantizedArray(value.codes, None, jnp.reshape(value.amax, ()), value.format, value.matrix, value.columns)


def _is_quantized(value: Any) -> bool:
    return isinstance(value, QuantizedArray)
