"""Takes NNX nodes apart into a template and leaves, and builds nodes from the template and other leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeGuard

import jax
from flax import nnx

# A leaf of a node's state: a variable, or an array that is a plain attribute of a node.
Leaf = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Template:
    """Holds everything of NNX nodes except their leaves.

    Attributes:
        graph: the graph definition of the nodes.
        tree: the structure of their state.
    """

    graph: Any
    tree: Any

    @property
    def paths(self) -> list[tuple[Any, ...]]:
        """The path of each leaf. Of several paths of a shared variable, it is the first."""
        return [path for path, _ in nnx.to_flat_state(jax.tree.unflatten(self.tree, range(self.tree.num_leaves)))]

    def merged(self, leaves: Sequence[Leaf]) -> Any:
        """Returns new nodes that hold copies of these variables, and these arrays. What the nodes shared, they
        share."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, leaves))


def split_nodes(nodes: Any) -> tuple[Template, list[Leaf]]:
    """Splits a node, or a pytree of nodes, into a template and leaves. The leaves are the nodes' own, not copies. Each
    shared variable is one leaf."""
    graph, state = nnx.split(nodes)
    leaves, tree = jax.tree.flatten(state, is_leaf=is_variable)
    return Template(graph, tree), leaves


def leaves_of(node: Any) -> dict[tuple[Any, ...], Leaf]:
    """Returns the variables of a node, and its arrays that are plain attributes, by path. They are the node's own, not
    copies. Of several paths of a shared variable, it is the first."""
    return dict(nnx.to_flat_state(nnx.split(node)[1]))


def is_variable(leaf: Any) -> TypeGuard[nnx.Variable]:
    """Returns whether a leaf is a variable, and not an array that is a plain attribute."""
    return isinstance(leaf, nnx.Variable)


def raw_value(leaf: Leaf) -> Any:
    """Returns what a variable holds, or the leaf itself if it is not a variable."""
    return leaf.get_raw_value() if is_variable(leaf) else leaf


def is_same(had: Sequence[Any], has: Sequence[Any]) -> bool:
    """Returns whether two sequences consist of the same objects, as do the leaves of a value that no call has set."""
    return len(had) == len(has) and all(a is b for a, b in zip(had, has, strict=True))


def with_raw_value(leaf: Leaf, value: Any, **metadata: Any) -> Leaf:
    """Returns a copy of the variable that holds `value`, with the given metadata set. If the leaf is not a variable,
    returns `value` itself."""
    return leaf.replace(value, **metadata) if is_variable(leaf) else value
