"""Reports what the hook does with the units, holders and sharded weights of a model, and with traced calls of its
units."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from ..chain import OFFLOADED
from ..layout import shards_of
from ..mesh import Roles
from ..recipes import Recipe
from ..variables import logical_shape
from ..weights import bytes_on_wire
from ._choice import name_of, names_of, own_variables
from ._codes import Coded, decide
from ._exchange import Exchange, decide_exchange
from ._multiply import axes_in_scope
from ._path import path_of, path_of_unit, paths_of
from ._placement import Placement, placement_of
from ._quantized import to_trace
from ._unit import Holder, Unit, kind_of, methods_of
from ._walk import recording

_COPY = "a copy"  # replaces the path of a copied unit if that path is unknown


@dataclasses.dataclass(frozen=True)
class UnitFact:
    """A unit, or a holder (a module that contains units), with weights to gather.

    Attributes:
        module: the path of the module in the model.
        also: other paths of the module, if several are found.
        type: the name of the module's class.
        weights: the number of its weights that must be gathered before use; for a holder, the number of those that it
            holds itself.
        shards: the number of shards of the weight that has the most.
        bytes: the size of its gathered weights in bytes, in the dtypes of the parameters. A weight counts as one slice
            if the last traced call that gathers the weight gathers only a slice.
        gathered: when the weights are gathered, in words.
    """

    module: str
    also: tuple[str, ...]
    type: str
    weights: int
    shards: int
    bytes: int
    gathered: str


@dataclasses.dataclass(frozen=True)
class WeightFact:
    """How a sharded weight is gathered under a recipe.

    Attributes:
        weight: the path of the weight in the model that was sharded.
        also: the other paths of the weight in that model.
        shape: its logical shape, or that of one slice if the last traced call that gathers the weight gathers only a
            slice.
        slices: the number of such slices in the weight; 1 if `shape` is that of the whole weight.
        wire: the name of the format to which it is quantized; empty if it is not quantized.
        bytes: the size in bytes of what ranks send of an array of this shape, all shards together: of codes, and of
            scales if they are sent; or, if the weight is not quantized, of elements in the dtype of the parameter,
            padding included. A call that casts an unquantized weight to a narrower dtype before the gather sends fewer
            bytes.
        reason: why the recipe does not quantize the weight. Empty if it does, or if no pattern of the recipe matches
            the weight and the recipe itself quantizes nothing, like `BF16`.
        multiplied: whether the recipe quantizes the weight, and asks for products with it to be computed in its
            formats.
    """

    weight: str
    also: tuple[str, ...]
    shape: tuple[int, ...]
    slices: int
    wire: str
    bytes: int
    reason: str
    multiplied: bool


@dataclasses.dataclass(frozen=True)
class UnitCall:
    """One call in which the hook gathers or quantizes the weights of a unit.

    Attributes:
        module: the path of the unit; "a copy" for a copy whose path is unknown.
        prefetched: whether its weights may be gathered while the previous unit computes.
        reason: why its weights are not prefetched; empty if they are.
        weights: the path, in the model that was sharded, and the logical shape of each weight that the call gathers or
            quantizes. Within a scan or vmap over stacked weights, the shape is that of a slice.
        multiplied: the paths of the weights that the call multiplies in the recipe's formats.
        narrow: the paths of the weights whose gradients should be summed in float32 or exchanged, but may not be,
            because the call has no product with them that supports this.
    """

    module: str
    prefetched: bool
    reason: str
    weights: tuple[tuple[str, tuple[int, ...]], ...] = ()
    multiplied: tuple[str, ...] = ()
    narrow: tuple[str, ...] = ()


def unit_facts(model: nnx.Module, calls: Sequence[UnitCall] = ()) -> tuple[UnitFact, ...]:
    """Returns a fact for every unit and holder in a model, except those without weights to gather.

    Args:
        model: the model.
        calls: calls of its units, from `calls_of`. They show which units are called, and in which shapes weights are
            gathered. A weight that no call gathers counts as gathered whole. Without calls, or if one of them is that
            of a copy whose path is unknown, every unit counts as called.

    Raises:
        ValueError: for the same reasons as `placement_of`.
    """
    found, names, seen = [], names_of(model), _shapes(calls)
    called = {call.module for call in calls}
    for path, module in nnx.iter_modules(model):
        kind = kind_of(module)
        if isinstance(kind, Unit):
            variables = [node for _, node in nnx.iter_graph(module) if isinstance(node, nnx.Variable)]
            when = "ahead of its call if possible, and again in backward unless kept"
            own = {name_of(name) for name in (path, *names.get(id(module), ()))}
            missed = bool(called) and _COPY not in called and not own & called
            if missed or not methods_of(type(module), kind.methods):
                when = f"by XLA, where methods other than {', '.join(kind.methods)} use them"
        elif isinstance(kind, Holder):
            variables = list(own_variables(module).values())
            when = "as its call begins, and kept for backward if needed"
        else:
            continue
        weights = [(v, p) for v in variables if (p := placement_of(v)) is not None and p.gathered]
        if weights:
            size = sum(math.prod(_gathered_shape(v, seen)) * v.get_raw_value().dtype.itemsize for v, _ in weights)
            shards = max(shards_of(placement) for _, placement in weights)
            also = tuple(name_of(other) for other in names.get(id(module), ()) if other != path)
            found.append(UnitFact(name_of(path), also, type(module).__name__, len(weights), shards, size, when))
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class ShardedWeight:
    """A sharded weight, and the decisions about it under a recipe.

    Attributes:
        paths: its paths in the model that was sharded.
        shape: its logical shape, or that of one slice if the last traced call that gathers the weight gathers only a
            slice.
        slices: the number of such slices in the weight; 1 if `shape` is that of the whole weight.
        dtype: the dtype of the stored array.
        placement: its placement, for an array of this shape.
        coded: how the weight is quantized for its gather; if it is not quantized, the reason in words, which may be
            empty.
        exchanged: how its gradient is to be exchanged; `None` if it is not exchanged.
        ahead: whether it belongs to a unit, which may gather it while the previous unit computes.
        wide: whether it belongs to a unit whose model was sharded with `grad_reduce="float32"`.
    """

    paths: tuple[tuple[str, ...], ...]
    shape: tuple[int, ...]
    slices: int
    dtype: np.dtype
    placement: Placement
    coded: Coded | str
    exchanged: Exchange | None
    ahead: bool
    wide: bool

    @property
    def bytes(self) -> int:
        """The size in bytes of what ranks send of an array of shape `shape`, all shards together: of codes, and of
        scales if they are sent; or, if the weight is not quantized, of elements in `dtype`, padding included."""
        if isinstance(self.coded, Coded):
            return bytes_on_wire(self.coded.spec(self.dtype))
        return math.prod(self.placement.with_padding(self.shape)) * self.dtype.itemsize


def sharded_weights(model: nnx.Module, recipe: Recipe, calls: Sequence[UnitCall] = ()) -> tuple[ShardedWeight, ...]:
    """Returns the sharded weights of a model.

    Args:
        model: the model.
        recipe: the recipe.
        calls: calls of its units, from `calls_of`. They show in which shapes weights are gathered. A weight that no
            call gathers counts as gathered whole.

    Raises:
        ValueError: for the same reasons as `placement_of`, or if the recipe asks for something that sharded models do
            not support.
    """
    units = [module for _, module in nnx.iter_modules(model) if isinstance(kind_of(module), Unit)]
    within = {id(node): kind_of(unit) for unit in units for _, node in nnx.iter_graph(unit)}
    found, seen = [], _shapes(calls)
    for _, variable in nnx.iter_graph(model):
        if (placement := placement_of(variable)) is None:
            continue
        value, shape = variable.get_raw_value(), _gathered_shape(variable, seen)
        placement, slices = placement.of_slice(shape), math.prod(logical_shape(variable)) // math.prod(shape)
        paths = paths_of(variable)
        coded = decide(recipe, paths, shape, placement)
        kind = within.get(id(variable))
        axes = axes_in_scope(kind.roles.batch) if isinstance(kind, Unit) else ()
        sums = decide_exchange(recipe, paths, shape, placement, axes)
        wide = isinstance(kind, Unit) and kind.wide
        dtype, ahead = np.dtype(value.dtype), kind is not None
        found.append(ShardedWeight(paths, shape, slices, dtype, placement, coded, sums, ahead, wide))
    return tuple(found)


def roles_of(model: nnx.Module) -> Roles | None:
    """Returns the roles with which the first unit of a model was sharded; `None` if the model has no units."""
    kinds = (kind_of(module) for _, module in nnx.iter_modules(model))
    return next((kind.roles for kind in kinds if isinstance(kind, Unit)), None)


def largest_unit(model: nnx.Module) -> int:
    """Returns an estimate of the bytes that the reduced gradients of the largest unit take on one rank if none of its
    weights is frozen; 0 if no unit has weights to gather. Counts 4 bytes per element if the model was sharded with
    `grad_reduce="float32"`, and otherwise 2, as in a model that computes in 16 bits."""
    units = [(module, kind) for _, module in nnx.iter_modules(model) if isinstance(kind := kind_of(module), Unit)]
    return max((_elements(module) * (4 if kind.wide else 2) for module, kind in units), default=0)


class OffloadingUnit(NamedTuple):
    """A unit that moves what it saves to the host's memory.

    Attributes:
        remat: its policy.
        batch: the axes of the mesh in scope that shard the batch.
        elements: the number of elements of its sharded matrices.
    """

    remat: str
    batch: tuple[str, ...]
    elements: int


def offloading_units(model: nnx.Module) -> dict[str, OffloadingUnit]:
    """Returns the units of a model that move what they save to the host's memory, by their paths in the model that was
    sharded."""
    found: dict[str, OffloadingUnit] = {}
    for _, module in nnx.iter_modules(model):
        kind, path = kind_of(module), path_of_unit(module)
        if isinstance(kind, Unit) and kind.remat in OFFLOADED and path is not None:
            weights = [node for _, node in nnx.iter_graph(module) if placement_of(node) is not None]
            shapes = [shape for shape in map(logical_shape, weights) if len(shape) > 1]
            found[name_of(path)] = OffloadingUnit(
                kind.remat, axes_in_scope(kind.roles.batch), sum(map(math.prod, shapes))
            )
    return found


def _elements(unit: nnx.Module) -> int:
    weights = [(node, p) for _, node in nnx.iter_graph(unit) if (p := placement_of(node)) is not None and p.gathered]
    return sum(math.prod(node.get_raw_value().shape) // shards_of(placement) for node, placement in weights)


def weight_facts(model: nnx.Module, recipe: Recipe, calls: Sequence[UnitCall] = ()) -> tuple[WeightFact, ...]:
    """Returns a fact for each sharded weight of a model.

    Args:
        model: the model.
        recipe: the recipe.
        calls: calls of its units, from `calls_of`. They show in which shapes weights are gathered. A weight that no
            call gathers counts as gathered whole.

    Raises:
        ValueError: for the same reasons as `sharded_weights`.
    """
    found = []
    for weight in sharded_weights(model, recipe, calls):
        (path, *others), coded = weight.paths, weight.coded
        wire, reason = (coded.wire.name, "") if isinstance(coded, Coded) else ("", coded)
        multiplied = isinstance(coded, Coded) and coded.operands is not None
        also = tuple(map(name_of, others))
        found.append(
            WeightFact(name_of(path), also, weight.shape, weight.slices, wire, weight.bytes, reason, multiplied)
        )
    return tuple(found)


def _shapes(calls: Sequence[UnitCall]) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each weight in the last call that gathers or quantizes it, by the path of the weight."""
    return {path: shape for call in calls for path, shape in call.weights}


def _gathered_shape(variable: nnx.Variable, seen: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    return seen.get(name_of(path_of(variable)), logical_shape(variable))


def calls_of(model: nnx.Module, function: Callable[..., Any], *args: Any) -> tuple[UnitCall, ...]:
    """Traces `function(model, *args)` with abstract arrays. Returns, in order, one `UnitCall` for each traced call in
    which the hook gathers or quantizes the weights of a unit. A call in the body of a scan counts once per trace of the
    body, not once per iteration."""
    graph, state = nnx.split(model)
    paths: dict[int, str] = {}

    def call(state: Any, *args: Any) -> None:
        own = to_trace(nnx.merge(graph, state))
        paths.update({id(module): name_of(path) for path, module in nnx.iter_modules(own)})
        function(own, *args)

    with recording() as steps:
        jax.eval_shape(call, state, *args)
    return tuple(
        UnitCall(
            paths[id(step.unit)] if id(step.unit) in paths else _path(step.unit),
            step.tied,
            step.reason,
            step.weights,
            step.multiplied,
            step.narrow,
        )
        for step in steps
    )


def _path(unit: nnx.Module) -> str:
    path = path_of_unit(unit)
    return _COPY if path is None else name_of(path)
