"""Refuses code that would compute with a rank's shard of a weight as if it were the weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from ..mesh import current_view
from ..weights import ModulePath
from ._choice import name_of
from ._path import path_of
from ._placement import placement_of, refuse_padded
from ._scope import is_within_unit

# Where a shard is read, and what to do instead.
_OUTSIDE = (
    "outside of a call that gathers it",
    "If a public method of the weight's block (or of its module, outside of blocks) reads the weight, name the method "
    "in `methods` of `gtp_jax.shard`",
)
_WITHIN_UNIT = (
    "within a call that gathers only the weights of the called module and of modules among its arguments",
    "Pass the module that holds the weight as an argument, instead of a closure or a bound method that refers to it",
)


def on_parts() -> bool:
    """Returns whether the view is local, in which each rank computes on its own parts of arrays."""
    return current_view() != "global" and not jax.sharding.get_abstract_mesh().empty


def refuse_shards(owner: nnx.Module, nodes: Mapping[ModulePath, Any]) -> None:
    """Raises an error in local view if a weight among a module's nodes must be gathered: this function is called while
    the hook is off, so no call gathers the weight. Does nothing if `is_within_unit`: the call of the unit has gathered
    its weights."""
    for path, node in nodes.items() if on_parts() and not is_within_unit() else ():
        placement = placement_of(node)
        if placement is not None and placement.gathered:
            raise ValueError(
                f"`gtp_jax.hook.without_hook` is in scope in local view, where only the hook gathers the weight "
                f"{'.'.join(map(str, path))} of {type(owner).__name__}: each rank would compute with its shard, of "
                f"shape {node.get_raw_value().shape}. Use the global view, or call the model outside of `without_hook`."
            )


def refuse_read(variable: nnx.Variable, value: Any) -> Any:
    """Returns the value that code reads from the variable of a sharded weight. Flax calls this function as the hook
    `on_get_value` of the variable.

    In local view, a variable has no placement while it holds a gathered weight. If it has one, it holds what this rank
    stores, even in the call of a unit, whose code may reach the variable through a closure, for example.

    Raises:
        ValueError: in local view, if the value is only a rank's shard of the weight; or for the same reasons as
            `current_view`, `refuse_padded` and `placement_of`.
    """
    refuse_padded(variable)
    placement = placement_of(variable) if on_parts() else None
    if placement is not None and placement.gathered:
        where, remedy = _WITHIN_UNIT if is_within_unit() else _OUTSIDE
        raise ValueError(
            f"the weight {name_of(path_of(variable))} is read in local view {where}: each rank would compute with its "
            f"shard, of shape {variable.get_raw_value().shape}. {remedy}. Otherwise, use the global view, or "
            "`get_raw_value()` for the shard itself."
        )
    return value
