"""Handles calls of `shard` with a model that is sharded already."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer

from ..weights import ModulePath
from ._call import lies, stripped
from ._choice import Blocks, in_order, name_of, named, own_variables
from ._placement import Placement, placement_of
from ._put import is_elsewhere, on_mesh, put
from ._unit import Unit, kind_of, unmade
from ._variables import of_own_layers, variables_of


def check_unchanged(
    model: nnx.Module, blocks: Blocks | None, options: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Raises an error if an option is neither the default nor the value with which the model was sharded, or if the
    modules that `blocks` matches are not exactly the blocks of the model.

    Args:
        model: the model, which is sharded already.
        blocks: the argument `blocks` of `shard`.
        options: other arguments of `shard`, by name; `specs` has the form of `Unit.specs`.
        defaults: their defaults, in the same form.
    """
    modules = list(in_order(model))
    units = [(path, module, kind) for path, module in modules if isinstance(kind := kind_of(module), Unit)]
    for _, _, unit in units:
        used = {**vars(unit), "grad_reduce": "float32" if unit.wide else None}
        for name, asked in options.items():
            if asked not in (used[name], defaults[name]):
                shown = (dict(asked), dict(used[name])) if name == "specs" else (asked, used[name])
                raise ValueError(_changed(f"`{name}` is {shown[0]!r}", repr(shown[1])))
    if blocks is None:
        return
    with unmade(module for _, module in modules):  # a function may ask for the exact class of a module
        asked = named(model, blocks)
    used = {path: module for path, module, unit in units if unit.block}
    if set(map(id, asked.values())) != set(map(id, used.values())):
        raise ValueError(_changed(f"`blocks` is {blocks!r}, which matches {_listed(asked)}", _listed(used)))


def put_back[M: nnx.Module](model: M) -> M:
    """Stores the concrete arrays of weights as `shard` first stored them, and puts other arrays on the mesh if they are
    on more or fewer devices (`is_elsewhere`). Returns the model.

    Raises:
        ValueError: if no array has to be put back, if an array cannot be divided as its weight was, or for the same
            reasons as `Placement.check_mesh` and `placement_of`.
    """
    variables, lost = variables_of(model), dict[int, Placement]()
    for _, module in nnx.iter_modules(model):
        if (kind := kind_of(module)) is not None:
            nodes: dict[ModulePath, Any] = dict(
                nnx.iter_graph(module) if isinstance(kind, Unit) else own_variables(module)
            )
            lost |= {id(nodes[path]): placement for path, placement in stripped(nodes, kind.placements).items()}
    for placement in set(lost.values()):
        placement.check_mesh("the model")
    moved = bool(lost)
    for paths, variable in variables.items():
        if id(variable) in lost:
            put(paths, variable, lost[id(variable)], own=False)
            continue
        placement, value = placement_of(variable), variable.get_raw_value()
        if placement is None or not isinstance(value, jax.Array | np.ndarray) or isinstance(value, Tracer):
            continue
        placement.check_mesh("the model")
        if not isinstance(value, jax.Array) or not lies(value, placement):
            variable.set_raw_value(on_mesh(value, placement.stored))
            moved = True
    others = {
        paths: [array for array in jax.tree.leaves(variable.get_raw_value()) if is_elsewhere(array)]
        for paths, variable in variables.items()
        if placement_of(variable) is None
    }
    if not moved and not any(array.committed for arrays in others.values() for array in arrays):
        raise ValueError(
            "the model, or a part of it, is sharded already, and no array has to be put back. Shard a whole model "
            "once; to shard it differently, build it again."
        )
    own = of_own_layers(model)
    for paths in (paths for paths, arrays in others.items() if arrays):
        put(paths, variables[paths], None, own=id(variables[paths]) in own)
    return model


def _changed(asked: str, used: str) -> str:
    return (
        f"{asked}, but the model is sharded already, with {used}. Leave it out to put arrays back as shards; to shard "
        "the model differently, build it again."
    )


def _listed(paths: Collection[ModulePath]) -> str:
    names = [name_of(path) or "the model itself" for path in paths]
    return (", ".join(names[:3]) + (", ..." if len(names) > 3 else "")) or "no module"
