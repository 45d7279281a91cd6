"""Splits values that may contain NNX nodes into arrays, and rebuilds them from arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

# A function that rebuilds a value from its arrays.
Rebuild = Callable[[Sequence[Any]], Any]


def is_node(value: Any) -> bool:
    """Returns whether a value is a module, another `nnx.Pytree`, or a variable."""
    return isinstance(value, nnx.Pytree | nnx.Variable)


def is_array(value: Any) -> bool:
    """Returns whether a value is a JAX array, traced or not."""
    return isinstance(value, jax.Array)


def taken_apart(value: Any, known: Mapping[int, Any]) -> tuple[list[Any], Rebuild]:
    """Returns the JAX arrays within a value, and a function that rebuilds the value from other arrays.

    Args:
        value: any pytree, whose leaves may be nodes. A node that is a leaf twice, and is not replaced, is rebuilt as
            two nodes.
        known: replacements of nodes, by the `id` of the node. The rebuilt value contains the replacement instead of the
            node, whose arrays are left out. If a module or another `nnx.Pytree` is not replaced itself, the nodes
            within it are not replaced either.
    """
    leaves, tree = jax.tree.flatten(value, is_leaf=is_node)
    arrays: list[Any] = []
    rebuilds: list[tuple[int, Rebuild]] = []
    for leaf in leaves:
        if id(leaf) in known:
            own, rebuild = [], _constant(known[id(leaf)])
        elif isinstance(leaf, nnx.Variable):
            own, rebuild = _variable(leaf, known)
        elif is_node(leaf):
            own, rebuild = _module(leaf)
        elif is_array(leaf):
            own, rebuild = [leaf], lambda found: found[0]
        else:
            own, rebuild = [], _constant(leaf)
        arrays += own
        rebuilds.append((len(own), rebuild))

    def put_together(found: Sequence[Any]) -> Any:
        values, start = [], 0
        for count, rebuild in rebuilds:
            values.append(rebuild(found[start : start + count]))
            start += count
        return jax.tree.unflatten(tree, values)

    return arrays, put_together


def variables_of(state: Any) -> tuple[list[Any], Any]:
    """Returns the leaves of an NNX state, and its structure. A leaf is a variable, or other data of a node, such as an
    array that is an attribute."""
    return jax.tree.flatten(state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def value_of(leaf: Any) -> Any:
    """Returns the value of a leaf: that of a variable, or the leaf itself if it is not a variable."""
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def with_value(leaf: Any, value: Any, **metadata: Any) -> Any:
    """Returns a leaf with another value: a copy of the variable, with the given metadata set, or, if the leaf is not a
    variable, the value itself."""
    return leaf.replace(value, **metadata) if isinstance(leaf, nnx.Variable) else value


def is_dynamic(value: Any) -> bool:
    """Returns whether a value is a JAX or NumPy array."""
    return isinstance(value, jax.Array | np.ndarray)


def _constant(value: Any) -> Rebuild:
    return lambda _: value


def _variable(variable: nnx.Variable, known: Mapping[int, Any]) -> tuple[list[Any], Rebuild]:
    arrays, rebuild = taken_apart(variable.get_raw_value(), known)
    bare = variable.replace(None)  # functions that outlive a trace must hold none of its tracers
    return arrays, lambda found: bare.replace(rebuild(found))


def _module(module: Any) -> tuple[list[Any], Rebuild]:
    graph, state = nnx.split(module)
    leaves, structure = variables_of(state)
    arrays, rebuild = taken_apart([value_of(leaf) for leaf in leaves], {})
    leaves = [with_value(leaf, None) for leaf in leaves]

    def merged(found: Sequence[Any]) -> Any:
        put = [with_value(leaf, value) for leaf, value in zip(leaves, rebuild(found), strict=True)]
        return nnx.merge(graph, jax.tree.unflatten(structure, put))

    return arrays, merged
