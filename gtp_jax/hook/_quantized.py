"""Finds the sharded weights of a model that a recipe quantizes, and quantizes them once for all calls in a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from ..weights import ModulePath, Scaling, Shards, Stretch, WireSpec, quantize_together
from ._choice import own_variables
from ._codes import Coded, coded
from ._made import place_name, with_made
from ._maxima import maximum_gradient
from ._placement import placement_of
from ._unit import Holder, Unit, kind_of


def quantized(model: nnx.Module, amaxes: Mapping[ModulePath, jax.Array]) -> tuple[Stretch, ...]:
    """Quantizes the sharded weights of a model's units and holders, under the recipe and in the view in scope, and
    returns their codes. Leaves out weights that the recipe does not quantize.

    Weights share a wire only if the same module, and no other, gathers them, because a call uses a wire only if it uses
    all of its members (`wires_of_call`).

    Args:
        model: the model.
        amaxes: the amax that sets the scale of each weight that `delayed` returns, by path.
    """
    specs: dict[ModulePath, WireSpec] = {}
    shards: dict[ModulePath, Shards] = {}
    given: dict[ModulePath, jax.Array] = {}
    for owners, path, variable, form in _coded(model):
        value, place = variable.get_raw_value(), place_name(path)
        name = (str(owners[0]) if len(owners) == 1 else place, place)
        specs[name] = form.spec(np.dtype(value.dtype))
        shards[name] = (form.to_matrix(lax.stop_gradient(value)),)
        if form.is_delayed:
            given[name] = amaxes[path]
    wires = quantize_together(specs, shards, given) if specs else ()
    return tuple(Stretch(wire, tuple(specs[name] for name in wire.members), 0, 1) for wire in wires)


def delayed(model: nnx.Module) -> dict[ModulePath, tuple[Coded, Any]]:
    """Returns how each sharded weight is quantized that the recipe in scope scales by amaxes of earlier steps, and its
    stored array, by its path in the model."""
    return {path: (form, v.get_raw_value()) for _, path, v, form in _coded(model) if form.is_delayed}


def to_trace[M: nnx.Module](model: M) -> M:
    """Gives arbitrary amaxes to the weights that `delayed` returns, so that calls can be traced outside of a step.
    Returns the model, which is changed."""
    amaxes = jnp.ones(3, jnp.float32)
    scaling = Scaling(amaxes, maximum_gradient(Scaling.slot_for(amaxes)))
    return with_made(model, (), None, dict.fromkeys(delayed(model), scaling))


def _coded(model: nnx.Module) -> Iterator[tuple[list[int], ModulePath, nnx.Variable, Coded]]:
    """Yields, for each quantized weight, the indices of the modules that gather it, its path, its variable, and how it
    is quantized. The index of a module is its position in `nnx.iter_modules`."""
    places = {id(node): place for place, node in nnx.iter_graph(model) if isinstance(node, nnx.Variable)}
    owners: dict[int, list[int]] = {}
    found: dict[int, nnx.Variable] = {}
    for number, (_, module) in enumerate(nnx.iter_modules(model)):
        kind = kind_of(module)
        if isinstance(kind, Unit):
            nodes = [node for _, node in nnx.iter_graph(module)]
        elif isinstance(kind, Holder):
            nodes = list(own_variables(module).values())
        else:
            continue
        for node in nodes:
            if isinstance(node, nnx.Variable) and placement_of(node) is not None:
                owners.setdefault(id(node), []).append(number)
                found[id(node)] = node
    for key, variable in found.items():
        placement = placement_of(variable)
        assert placement is not None
        form = coded(variable, placement)
        if form is not None:
            yield owners[key], places[key], variable, form
