"""Pads the weights of a model so that all ranks store equal shares of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from flax import nnx

from ..layout import Placement, shares_may_be_even
from ..mesh import legacy_mesh_in_scope
from ..variables import Padded, even_layout, store_even
from ..weights import ModulePath
from ._choice import own_variables
from ._put import put
from ._shard import placements_in
from ._unit import Unit, kind_of, make
from ._variables import variables_of


@legacy_mesh_in_scope()
def store_evenly(model: nnx.Module, where: Callable[[nnx.Variable], bool] = lambda _: True) -> None:
    """Stores each parameter padded that has an `even_layout`, in place. Frozen weights stay as they are, and so does
    everything in the scope of `even_shares(False)`.

    Args:
        model: the model, which may be abstract.
        where: whether to store a parameter padded.
    """
    if not shares_may_be_even():
        return
    again = False
    for paths, variable in variables_of(model).items():
        even = even_layout(variable)
        if even is None or not _can_be_padded(variable) or not where(variable):
            continue
        if isinstance(even, Placement):
            put(paths, variable, even, own=False)
            again = True
        else:
            store_even(variable)
    if not again:
        return
    for module in [module for _, module in nnx.iter_modules(model)]:
        if (kind := kind_of(module)) is not None:
            own = nnx.iter_graph(module) if isinstance(kind, Unit) else own_variables(module)
            nodes: dict[ModulePath, Any] = dict(own)
            make(module, dataclasses.replace(kind, placements=placements_in(nodes)))


def _can_be_padded(variable: nnx.Variable) -> bool:
    """Returns whether a variable is a weight that was laid out to be padded, not one that has copied its metadata."""
    return type(variable) is nnx.Param or (isinstance(variable, nnx.Param) and isinstance(variable, Padded))
