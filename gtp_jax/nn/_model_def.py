"""Splits a model into plain arrays and a definition, from which the model can be merged again."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
from flax import nnx

from .._random_keys import as_key, is_key, key_impl, key_words
from ..formats import QuantizedArray
from ..hook import largest_unit
from ..layout import AnyLayout, Layout, cut_shape
from ..mesh import Path, Roles, check_mesh_in_scope, current_roles, with_paths
from ..variables import Leaf, Template, is_variable, leaves_of, padded_layout, split_nodes, with_raw_value
from ._frozen import Frozen, padded_codes
from ._layer import check_shape, layout_of, partition_of, value_of, with_value
from ._owners import layer_counts
from ._update_rule import UpdateRule, update_rule_of

Tree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class ModelDef:
    """Holds everything in a model except its arrays. Definitions are compared by identity, so that they are cheap as
    static data of a pytree.

    Attributes:
        template: the modules without their variables and arrays.
        variables: the leaves of the modules: the variables without their values, and `None` for each array that is a
            plain attribute.
        specs: a nested dict of the parameters' partitions.
        layouts: a nested dict with the `Layout` of each parameter, or `None`; see `layout_of`.
        state_specs: a nested dict of the partitions of the variables that are neither parameters nor frozen, and of the
            arrays that are plain attributes.
        key_impls: the implementation of the random generator of each variable that holds random keys, by path.
            `Split.model_state` holds the words of these keys, not the keys.
        roles: the roles of the mesh axes.
        frozen_specs: a nested dict of the partitions of the variables that are frozen (`Frozen`), including the seeds
            of adapters' dropout. For a weight stored as codes, those of its codes and scales.
        update_rules: the update rules of parameters that the optimizer does not update, by path.
        padded: the layouts of the stored arrays of parameters and frozen weights that are padded, by path. A weight
            that is frozen as codes has a `Placement` for each of its arrays.
        layer_counts: the number of layers that each parameter holds along its first dimension, by path; 0 outside a
            `Stack`.
        largest_unit: for the largest unit of `gtp_jax.shard` (a module whose weights are gathered together), an
            estimate of the bytes of one rank's part of the reduced gradients; 0 without units.
    """

    template: Template
    variables: list[Leaf]
    specs: dict[str, Any]
    layouts: dict[str, Any]
    state_specs: dict[str, Any] = dataclasses.field(default_factory=dict)
    key_impls: dict[Any, Any] = dataclasses.field(default_factory=dict)
    roles: Roles = Roles()
    frozen_specs: dict[str, Any] = dataclasses.field(default_factory=dict)
    update_rules: dict[tuple[str, ...], UpdateRule] = dataclasses.field(default_factory=dict)
    padded: dict[Path, AnyLayout] = dataclasses.field(default_factory=dict)
    layer_counts: dict[tuple[str, ...], int] = dataclasses.field(default_factory=dict)
    largest_unit: int = 0

    def check_mesh(self) -> None:
        """Checks that the trained weights were laid out for the degrees of the mesh in scope.

        Raises:
            ValueError: if they were laid out for other degrees; or if gtp_jax cannot use the mesh in scope (see
                `check_mesh_in_scope`).
        """
        check_mesh_in_scope()
        for layout in set(jax.tree.leaves(self.layouts, is_leaf=_is_layout)):
            layout.check_mesh("the model")

    def logical_shapes(self, params: Tree) -> dict[Path, tuple[int, ...]]:
        """Returns the shape of each parameter without padding, by path. Leading dimensions of layers are included."""
        return {
            path: cut_shape(leaf.shape, self.padded[path]) if path in self.padded else leaf.shape
            for path, leaf in with_paths(params)
        }

    def model(self, params: Tree, model_state: Tree | None = None, frozen: Tree | None = None) -> Any:
        """Returns the model with the given arrays.

        Args:
            params: a nested dict of the parameters.
            model_state: a nested dict of the other variables, if there are any.
            frozen: a nested dict of the values of the frozen variables, if there are any.
        """
        put = []
        for path, v in zip(self.template.paths, self.variables, strict=True):
            tree_of = params if isinstance(v, nnx.Param) else frozen if isinstance(v, Frozen) else model_state
            value = _at(tree_of, path)
            put.append(with_value(v, as_key(value, self.key_impls[path]) if path in self.key_impls else value))
        return self.template.merged(put)

    def state_of(self, model: nnx.Module) -> dict[str, Any]:
        """Returns the values of the variables of `model` that are neither parameters nor frozen, for example after a
        call, as in `Split.model_state`. Leaves out variables that the model did not have when it was split."""
        known = set(self.template.paths)
        found = leaves_of(model)
        return _nested([(path, _value(v)) for path, v in found.items() if _is_other(v) and path in known])


class Split(NamedTuple):
    """A model split into its definition and nested dicts of arrays.

    Attributes:
        model_def: the definition.
        params: the stored arrays of the parameters.
        model_state: the values of the other variables, such as batch statistics and counts; for random keys, their
            words (see `ModelDef.key_impls`).
        frozen: the parameters that are not trained, which may be stored as codes (see `freeze`), and the seeds of
            adapters' dropout.
    """

    model_def: ModelDef
    params: dict[str, Any]
    model_state: dict[str, Any]
    frozen: dict[str, Any]


def split_model(model: nnx.Module) -> Split:
    """Splits a model into its definition and its arrays.

    Raises:
        ValueError: if modules were built under different roles; if the array of a weight does not have the shape that
            the weight was built with; or if the model has an `nnx.WeightNorm` or `nnx.SpectralNorm`, because these
            write parameters when they are called.
    """
    _refuse_writers(model)
    template, leaves = split_nodes(model)
    known = list(zip(template.paths, leaves, strict=True))
    for path, leaf in known:
        check_shape(leaf, ".".join(map(str, path)))
    params = [(path, v) for path, v in known if isinstance(v, nnx.Param)]
    frozen = [(path, v) for path, v in known if isinstance(v, Frozen)]
    others = [(path, v) for path, v in known if _is_other(v)]
    model_def = ModelDef(
        template,
        [with_raw_value(v, None) if is_variable(v) else None for v in leaves],
        _nested([(path, partition_of(v)) for path, v in params]),
        _nested([(path, layout_of(v)) for path, v in params]),
        _nested([(path, _partitions(v)) for path, v in others]),
        {path: key_impl(value_of(v)) for path, v in others if is_key(value_of(v))},
        _roles_of([layout for _, v in (*params, *frozen) if (layout := layout_of(v)) is not None]),
        _nested([(path, _partitions(v)) for path, v in frozen]),
        {tuple(map(str, path)): rule for path, v in params if (rule := update_rule_of(v)) is not None},
        {
            (*map(str, path), *name): layout
            for path, v in known
            if is_variable(v)
            for name, layout in _padded(v).items()
        },
        layer_counts(model),
        largest_unit(model),
    )
    values = _nested([(path, v.get_raw_value()) for path, v in params])
    return Split(model_def, values, *(_nested([(path, _value(v)) for path, v in own]) for own in (others, frozen)))


def _is_other(leaf: Leaf) -> bool:
    """Returns whether a leaf is a variable that is neither a parameter nor frozen, or an array that is a plain
    attribute."""
    return not isinstance(leaf, nnx.Param | Frozen)


def _value(leaf: Leaf) -> Any:
    """Returns the value of a variable; for random keys, their words."""
    value = value_of(leaf)
    return key_words(value) if is_key(value) else value


def _padded(variable: nnx.Variable) -> dict[Path, AnyLayout]:
    """Returns the layouts of those of a variable's arrays that are stored padded, by path within the variable."""
    layout = padded_layout(variable)
    if layout is not None:
        return {(): layout}
    return {(name,): own for name, own in padded_codes(variable).items()}


def _partitions(leaf: Leaf) -> Any:
    """Returns the partition of each array that a variable holds."""
    spec, value = partition_of(leaf), value_of(leaf)
    return spec if isinstance(value, QuantizedArray) else jax.tree.map(lambda _: spec, value)


def _nested(by_path: list[tuple[Any, Any]]) -> dict[str, Any]:
    """Returns pairs of a path and a value as nested dicts."""
    found: dict[str, Any] = {}
    for path, value in by_path:
        *ahead, last = map(str, path)
        node = found
        for key in ahead:
            node = node.setdefault(key, {})
        node[last] = value
    return found


def _roles_of(layouts: list[Layout]) -> Roles:
    """Returns the roles with which a model's weights were laid out; the roles in scope if there are no such weights.

    Raises:
        ValueError: if weights were laid out with different roles.
    """
    roles = {layout.roles for layout in layouts}
    if len(roles) > 1:
        raise ValueError(
            f"the model has modules built under different roles: {', '.join(map(str, roles))}. Build the whole model "
            "under one `gtp_jax.mesh.use_roles(...)`."
        )
    return roles.pop() if roles else current_roles()


def _refuse_writers(model: nnx.Module) -> None:
    """Raises a `ValueError` if a model has a Flax module that sets the parameters of its layer. A step updates the
    parameters that it was given, so it would lose the change."""
    for path, module in nnx.iter_modules(model):
        if isinstance(module, nnx.WeightNorm | nnx.SpectralNorm):
            raise ValueError(
                f"{'.'.join(map(str, path)) or 'the model'} is an `nnx.{type(module).__name__}`, which sets the "
                "parameters of its layer in every call. A step updates the parameters that it received, so the "
                "values that are set would be lost. Train with `nnx.Optimizer` under `nnx.jit`, which keeps them; "
                "or write a layer that normalizes a `gtp_jax.Param` before the product and leaves the parameter "
                "unchanged."
            )


def _is_layout(node: Any) -> bool:
    return isinstance(node, Layout)


def _at(params: Tree, path: tuple[Any, ...]) -> Any:
    for key in path:
        params = params[str(key)]
    return params
