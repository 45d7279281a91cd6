"""Reports what the hook does with each module of a model and with each call of a unit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from ..recipes import Recipe
from ..weights import bytes_on_wire
from ._choice import name_of, own_variables
from ._codes import Coded, decide
from ._path import path_of
from ._placement import placement_of, shards_of
from ._unit import Holder, Unit, kind_of
from ._walk import recording


@dataclasses.dataclass(frozen=True)
class UnitFact:
    """A module whose weights are gathered.

    Attributes:
        module: the path of the module in the model.
        type: the name of the module's class.
        weights: the number of its sharded weights.
        shards: the largest number of shards of any of these weights.
        bytes: the size of its gathered weights in bytes, in the dtypes of the parameters.
        gathered: the time at which they are gathered, in words.
    """

    module: str
    type: str
    weights: int
    shards: int
    bytes: int
    gathered: str


@dataclasses.dataclass(frozen=True)
class WeightFact:
    """How a sharded weight travels under a recipe.

    Attributes:
        weight: the path of the weight in the model.
        shape: its logical shape.
        wire: the name of the format; empty if the weight travels in the dtype in which it is used.
        bytes: the size of the gathered weight on the wire in bytes, codes and scales of all shards together; without a
            format, in the dtype of the parameter.
        reason: why it is not quantized.
        multiplied: whether products with it are to be computed in a format.
    """

    weight: str
    shape: tuple[int, ...]
    wire: str
    bytes: int
    reason: str
    multiplied: bool


@dataclasses.dataclass(frozen=True)
class UnitCall:
    """One call of a unit.

    Attributes:
        module: the path of the unit in the model.
        prefetched: whether its weights are gathered while the previous unit computes.
        reason: the reason why they are gathered at the call instead; empty if prefetched.
        multiplied: the paths of the weights that the call multiplies in the recipe's format.
    """

    module: str
    prefetched: bool
    reason: str
    multiplied: tuple[str, ...] = ()


def unit_facts(model: nnx.Module) -> tuple[UnitFact, ...]:
    """Returns a fact for each unit and each holder of a model that has sharded weights."""
    found = []
    for path, module in nnx.iter_modules(model):
        kind = kind_of(module)
        if isinstance(kind, Unit):
            variables = [node for _, node in nnx.iter_graph(module) if isinstance(node, nnx.Variable)]
            when = "ahead of its call, in both passes"
        elif isinstance(kind, Holder):
            variables = own_variables(module)
            when = "as its call begins, and kept for backward if needed"
        else:
            continue
        weights = [(v, p) for v in variables if (p := placement_of(v)) is not None and p.gathered]
        if weights:
            size = sum(math.prod(v.get_raw_value().shape) * v.get_raw_value().dtype.itemsize for v, _ in weights)
            shards = max(shards_of(placement) for _, placement in weights)
            found.append(UnitFact(name_of(path), type(module).__name__, len(weights), shards, size, when))
    return tuple(found)


def largest_unit(model: nnx.Module) -> int:
    """Returns the largest number of gradient elements that a rank stores for any unit; 0 without units."""
    units = (module for _, module in nnx.iter_modules(model) if isinstance(kind_of(module), Unit))
    return max(map(_elements, units), default=0)


def _elements(unit: nnx.Module) -> int:
    weights = [(node, p) for _, node in nnx.iter_graph(unit) if (p := placement_of(node)) is not None and p.gathered]
    return sum(math.prod(node.get_raw_value().shape) // shards_of(placement) for node, placement in weights)


def weight_facts(model: nnx.Module, recipe: Recipe) -> tuple[WeightFact, ...]:
    """Returns a fact for each sharded weight of a model.

    Raises:
        ValueError: if the recipe asks for something that sharded models do not support.
    """
    found = []
    for _, variable in nnx.iter_graph(model):
        placement = placement_of(variable)
        if placement is None:
            continue
        value, path = variable.get_raw_value(), path_of(variable)
        decided = decide(recipe, path, tuple(value.shape), placement)
        size = math.prod(value.shape) * value.dtype.itemsize
        wire, reason = ("", decided) if isinstance(decided, str) else (decided.form.name, "")
        multiplied = isinstance(decided, Coded) and decided.operands is not None
        if isinstance(decided, Coded):
            size = bytes_on_wire(decided.group(np.dtype(value.dtype), np.dtype(value.dtype)))
        found.append(WeightFact(".".join(path), tuple(value.shape), wire, size, reason, multiplied))
    return tuple(found)


def calls_of(model: nnx.Module, function: Callable[..., Any], *args: Any) -> tuple[UnitCall, ...]:
    """Traces `function(model, *args)`, without running it, and returns how each call of a unit is ordered."""
    graph, state = nnx.split(model)
    paths: dict[int, str] = {}

    def call(state: Any, *args: Any) -> None:
        own = nnx.merge(graph, state)
        paths.update({id(module): name_of(path) for path, module in nnx.iter_modules(own)})
        function(own, *args)

    with recording() as steps:
        jax.eval_shape(call, state, *args)
    return tuple(
        UnitCall(paths.get(id(step.unit), "a copy"), step.tied, step.reason, step.multiplied) for step in steps
    )
