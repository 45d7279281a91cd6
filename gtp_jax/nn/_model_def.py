"""A model taken apart into plain arrays and what is needed to put it together again."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx

from ..layout import Layout
from ..mesh import Roles, current_roles
from ._layer import layout_of, partition_of

Tree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class ModelDef:
    """Everything of a model but its arrays. Compared by identity, so that it is cheap as static data of a pytree.

    Attributes:
        graph: the modules.
        state: the parameters' variables, without values.
        specs: nested dict of partitions.
        layouts: nested dict of `Layout`, or `None` for a parameter that is not gathered.
        roles: of mesh axes.
    """

    graph: Any
    state: Any
    specs: dict[str, Any]
    layouts: dict[str, Any]
    roles: Roles = Roles()

    def check_mesh(self) -> None:
        """Refuses a mesh in scope that the model was not built for.

        Raises:
            ValueError: naming both.
        """
        for layout in set(jax.tree.leaves(self.layouts, is_leaf=_is_layout)):
            layout.check_mesh("the model")

    def model(self, params: Tree) -> Any:
        """Returns the model with `params` for its parameters."""
        leaves, tree = jax.tree.flatten(self.state, is_leaf=_is_variable)
        paths = [path for path, _ in nnx.to_flat_state(self.state)]
        put = [v.replace(_at(params, path)) for path, v in zip(paths, leaves, strict=True)]
        return nnx.merge(self.graph, jax.tree.unflatten(tree, put))


def split_model(model: nnx.Module) -> tuple[ModelDef, dict[str, Any]]:
    """Returns a model's definition and its parameters as nested dicts of arrays.

    Raises:
        ValueError: if the model holds state other than parameters, such as batch statistics or dropout streams; if its
            modules were built under different roles.
    """
    graph, state = nnx.split(model)
    others = [(path, variable) for path, variable in nnx.to_flat_state(state) if not isinstance(variable, nnx.Param)]
    if others:
        path, variable = others[0]
        raise ValueError(
            f"the model holds {type(variable).__name__} at {'.'.join(map(str, path))}; a train step carries "
            "parameters (nnx.Param) only. Keep other state outside the model."
        )
    specs = jax.tree.map(partition_of, state, is_leaf=_is_variable)
    params = jax.tree.map(lambda v: v.get_value(), state, is_leaf=_is_variable)
    bare = jax.tree.map(lambda v: v.replace(None), state, is_leaf=_is_variable)
    layouts = jax.tree.map(layout_of, state, is_leaf=_is_variable)
    return ModelDef(graph, bare, _dicts(specs), _dicts(layouts), _roles_of(layouts)), _dicts(params)


def _roles_of(layouts: Any) -> Roles:
    """Returns the roles that a model's weights were laid out by; those in scope if it has none."""
    roles = {layout.roles for layout in jax.tree.leaves(layouts, is_leaf=_is_layout)}
    if len(roles) > 1:
        raise ValueError(
            f"the model has modules built under different roles: {', '.join(map(str, roles))}. Build all of it under "
            "one `gtp_jax.use_roles(...)`."
        )
    return roles.pop() if roles else current_roles()


def _is_layout(node: Any) -> bool:
    return isinstance(node, Layout)


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _at(params: Tree, path: tuple[Any, ...]) -> Any:
    for key in path:
        params = params[str(key)]
    return params


def _dicts(node: Any) -> Any:
    """Returns plain nested dicts with string keys out of an NNX state."""
    if isinstance(node, nnx.State | dict):
        return {str(key): _dicts(value) for key, value in node.items()}
    return node
