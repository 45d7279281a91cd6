"""Pads the weights of a model so that all ranks store equal shares of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from flax import nnx

from ..layout import Placement, shares_may_be_even
from ..mesh import legacy_mesh_in_scope
from ..variables import Padded, even_layout, is_variable, split_nodes, store_even
from ..weights import ModulePath
from ._choice import name_of, own_variables
from ._put import put
from ._shard import placements_in
from ._unit import Unit, kind_of, make
from ._variables import variables_of


@legacy_mesh_in_scope()
def evenly_stored[M: nnx.Module](
    model: M, where: Callable[[nnx.Variable], bool] = lambda _: True
) -> tuple[M, list[str]]:
    """Returns the model with each parameter padded that has an `even_layout`, and the names of these parameters.

    Returns the given model if there are none, as in the scope of `even_shares(False)`, and otherwise a copy that shares
    all other arrays with it. The given model does not change.

    Args:
        model: the model, which may be abstract.
        where: whether to pad a parameter of the given model.
    """
    template, leaves = split_nodes(model)
    pads = [is_variable(leaf) and _can_be_padded(leaf) and where(leaf) for leaf in leaves]
    if not shares_may_be_even() or not any(pads):
        return model, []
    leaves = [leaf.replace(leaf.get_raw_value()) if is_variable(leaf) else leaf for leaf in leaves]
    to_pad = {id(leaf) for leaf, chosen in zip(leaves, pads, strict=True) if chosen}
    model = template.merged(leaves)
    names = []
    for paths, variable in variables_of(model).items():
        if id(variable) not in to_pad:
            continue
        names.append(name_of(paths[0]))
        if isinstance(even := even_layout(variable), Placement):
            put(paths, variable, even, own=False)
        else:
            store_even(variable)
    for module in [module for _, module in nnx.iter_modules(model)]:
        if (kind := kind_of(module)) is not None:
            own = nnx.iter_graph(module) if isinstance(kind, Unit) else own_variables(module)
            nodes: dict[ModulePath, Any] = dict(own)
            make(module, dataclasses.replace(kind, placements=placements_in(nodes)))
    return model, names


def _can_be_padded(variable: nnx.Variable) -> bool:
    """Returns whether a variable is a weight that was laid out to be padded, not one that has copied its metadata."""
    is_weight = type(variable) is nnx.Param or (isinstance(variable, nnx.Param) and isinstance(variable, Padded))
    return is_weight and even_layout(variable) is not None
