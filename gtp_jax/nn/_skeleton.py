"""A model taken apart into plain arrays and what is needed to put it together again."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx

from ..mesh import Layout
from ._layer import Cut, check_degrees, cut_of, layout_of, partition_of

Tree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Skeleton:
    """Everything of a model but its arrays. Compared by identity, so that it is cheap as static data of a pytree.

    Attributes:
        graph: the modules.
        state: the parameters' variables, without values.
        layouts: nested dict of `Layout`, or `None` where the stored array is the logical one.
        specs: nested dict of partitions.
        cuts: how its weights are cut over the mesh that it was built for.
    """

    graph: Any
    state: Any
    layouts: dict[str, Any]
    specs: dict[str, Any]
    cuts: frozenset[Cut] = frozenset()

    def check_mesh(self) -> None:
        """Refuses a mesh in scope that the model was not built for.

        Raises:
            ValueError: naming both.
        """
        for cut in self.cuts:
            check_degrees(cut, "the model")

    def model(self, params: Tree) -> Any:
        """The model with `params` for its parameters."""
        leaves, tree = jax.tree.flatten(self.state, is_leaf=_is_variable)
        paths = [path for path, _ in nnx.to_flat_state(self.state)]
        put = [v.replace(_at(params, path)) for path, v in zip(paths, leaves, strict=True)]
        return nnx.merge(self.graph, jax.tree.unflatten(tree, put))

    def logical(self, params: Tree) -> Tree:
        """Parameters, or anything shaped like them, without padding."""
        return self._by_layout(params, lambda layout, value: layout.logical(value))

    def physical(self, params: Tree) -> Tree:
        """The inverse of `logical`."""
        return self._by_layout(params, lambda layout, value: layout.physical(value))

    def _by_layout(self, params: Tree, change: Any) -> Tree:
        layouts = jax.tree.leaves(self.layouts, is_leaf=lambda x: x is None or isinstance(x, Layout))
        leaves, tree = jax.tree.flatten(params)
        pairs = zip(layouts, leaves, strict=True)
        return jax.tree.unflatten(tree, [v if layout is None else change(layout, v) for layout, v in pairs])


def take_apart(model: nnx.Module) -> tuple[Skeleton, dict[str, Any]]:
    """A model's skeleton and its parameters as nested dicts of arrays.

    Raises:
        ValueError: if the model holds state other than parameters, such as batch statistics or dropout streams.
    """
    graph, state = nnx.split(model)
    others = [(path, variable) for path, variable in nnx.to_flat_state(state) if not isinstance(variable, nnx.Param)]
    if others:
        path, variable = others[0]
        raise ValueError(
            f"the model holds {type(variable).__name__} at {'.'.join(map(str, path))}; a train step carries "
            "parameters (nnx.Param) only. Keep other state outside the model."
        )
    layouts = jax.tree.map(_padded_layout, state, is_leaf=_is_variable)
    specs = jax.tree.map(partition_of, state, is_leaf=_is_variable)
    params = jax.tree.map(lambda v: v.get_value(), state, is_leaf=_is_variable)
    bare = jax.tree.map(lambda v: v.replace(None), state, is_leaf=_is_variable)
    found = [layout_of(v) for v in jax.tree.leaves(state, is_leaf=_is_variable)]
    cuts = frozenset(cut_of(layout) for layout in found if layout is not None)
    return Skeleton(graph, bare, _dicts(layouts), _dicts(specs), cuts), _dicts(params)


def _padded_layout(variable: nnx.Variable) -> Layout | None:
    layout = layout_of(variable)
    return layout if layout is not None and layout.padded else None


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _at(params: Tree, path: tuple[Any, ...]) -> Any:
    for key in path:
        params = params[str(key)]
    return params


def _dicts(node: Any) -> Any:
    """Plain nested dicts with string keys out of an NNX state."""
    if isinstance(node, nnx.State | dict):
        return {str(key): _dicts(value) for key, value in node.items()}
    return node
