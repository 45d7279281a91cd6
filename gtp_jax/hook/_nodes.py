"""Splits values that may contain NNX nodes into arrays, and rebuilds them from arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from ..variables import raw_value, split_nodes, with_raw_value

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
        value: any pytree, whose leaves may be nodes, or plain objects with nodes or arrays in attributes. What two of
            the nodes share, they share in the rebuilt value too.
        known: replacements of nodes, by the `id` of the node. The rebuilt value contains the replacement instead of the
            node, whose arrays are left out. If a module or another `nnx.Pytree` is not replaced itself, the nodes
            within it are not replaced either.
    """
    leaves, tree = jax.tree.flatten(value, is_leaf=is_node)
    if any(map(_is_record, leaves)):
        fields = [vars(leaf) if _is_record(leaf) else leaf for leaf in leaves]
        arrays, rebuild = taken_apart(fields, known)
        kinds = [type(leaf) if _is_record(leaf) else None for leaf in leaves]  # not the objects, which hold tracers

        def with_records(found: Sequence[Any]) -> Any:
            each = zip(kinds, rebuild(found), strict=True)
            return jax.tree.unflatten(tree, [own if kind is None else _with_fields(kind, own) for kind, own in each])

        return arrays, with_records
    kept = [known.get(id(leaf), None if is_node(leaf) or is_array(leaf) else leaf) for leaf in leaves]
    at_nodes = [i for i, leaf in enumerate(leaves) if is_node(leaf) and id(leaf) not in known]
    at_arrays = [i for i, leaf in enumerate(leaves) if is_array(leaf) and id(leaf) not in known]
    of_nodes, rebuild = _nodes([leaves[i] for i in at_nodes], known) if at_nodes else ([], _constant([]))

    def put_together(found: Sequence[Any]) -> Any:
        values = list(kept)
        for i, node in zip(at_nodes, rebuild(found[: len(of_nodes)]), strict=True):
            values[i] = node
        for i, array in zip(at_arrays, found[len(of_nodes) :], strict=True):
            values[i] = array
        return jax.tree.unflatten(tree, values)

    return [*of_nodes, *(leaves[i] for i in at_arrays)], put_together


def is_dynamic(value: Any) -> bool:
    """Returns whether a value is a JAX or NumPy array."""
    return isinstance(value, jax.Array | np.ndarray)


def _is_record(leaf: Any) -> bool:
    """Returns whether a leaf is a plain object, such as an instance of a dataclass, with nodes or arrays in attributes.
    JAX does not take such an object apart."""
    if is_node(leaf) or is_array(leaf) or callable(leaf) or not hasattr(leaf, "__dict__"):
        return False
    return any(is_node(one) or is_array(one) for one in jax.tree.leaves(vars(leaf), is_leaf=is_node))


def _with_fields(kind: type, fields: Mapping[str, Any]) -> Any:
    """Returns an object of a class with these attributes, and no others."""
    found = object.__new__(kind)
    found.__dict__.update(fields)
    return found


def _constant(value: Any) -> Rebuild:
    return lambda _: value


def _nodes(nodes: list[Any], known: Mapping[int, Any]) -> tuple[list[Any], Rebuild]:
    template, leaves = split_nodes(nodes)
    arrays, rebuild = taken_apart(list(map(raw_value, leaves)), known)
    bare = [with_raw_value(leaf, None) for leaf in leaves]  # functions that outlive a trace must hold no tracers of it
    return arrays, lambda found: template.merged(list(map(with_raw_value, bare, rebuild(found))))
