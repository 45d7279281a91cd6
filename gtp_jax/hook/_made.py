"""Gives sharded weights the codes and the keys of stochastic rounding that a step has made for them, in the metadata of
their variables.

[Note: once per step]
A step calls the model once per microbatch. Before the first call, it quantizes the weights once for all microbatches.
The codes belong to the arrays that the model holds at that time. If code puts another array into a variable, or a
transformation calls a module with arrays of its own (a scan over stacked weights, `nnx.remat`), the call quantizes that
array.

Codes name weights by their places in the model of the step: copies of a sharded module, and models that were sharded
one by one, have weights with the same `path_of`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from ..weights import Beside, CallKeys, Stored, Stretch, Wire, key_for
from ._codes import Coded
from ._path import path_of
from ._placement import placement_of


def with_made[M: nnx.Module](model: M, codes: Sequence[Stretch], key: jax.Array | None) -> M:
    """Gives the sharded weights of a model the codes and keys that a step has made for them, and returns the model.

    Args:
        model: the model, which is changed. It must not outlive the trace of `codes` and `key`.
        codes: what `quantized` returned for a model with the same weights.
        key: the key of this step, microbatch and rank, uint32 `(2,)`, from which each weight gets a key of its own;
            `None` if nothing is rounded stochastically.
    """
    of_weights = {name[-1]: (stretch,) for stretch in codes for name in stretch.wire.members}
    for place, variable in nnx.iter_graph(model):
        if placement_of(variable) is None:
            continue
        keys = None if key is None else CallKeys(key_for(key, path_of(variable)))
        name = place_name(place)
        if name in of_weights or keys is not None:
            made = Stored(variable.get_raw_value(), (), of_weights.get(name, ()), keys)
            variable.set_metadata(made=Beside(made), made_for=name)
    return model


def place_name(place: Sequence[Any]) -> str:
    """Returns the name of a weight among the codes of a step, given its path in the model of the step."""
    return str(tuple(place))


def keys_of_call(variable: Any) -> CallKeys | None:
    """Returns the keys of the current call for a weight, one for each of its products; `None` if the weight has
    none."""
    made = _made(variable)
    return None if made is None or made.keys is None else made.keys.for_view()


def wires_of_call(variables: Sequence[Any], formats: Sequence[Coded | None]) -> tuple[Wire, ...]:
    """Returns the codes that the step has made of the weights of a call, as wires whose members are named by the
    numbers of these weights.

    Args:
        variables: the variables of the weights.
        formats: the format in which each travels; `None` for weights that are not quantized.
    """
    found: dict[int, tuple[Stretch, dict[Any, int]]] = {}
    for number, (variable, form) in enumerate(zip(variables, formats, strict=True)):
        made, known_as = _made(variable), variable.get_metadata().get("made_for")
        if made is None or form is None:
            continue
        for stretch in made.prepared:
            for name, group in zip(stretch.wire.members, stretch.groups, strict=True):
                if name[-1] == known_as and form.group(group.dtype, group.param_dtypes[0]) == group:
                    found.setdefault(id(stretch), (stretch, {}))[1][name] = number
    complete = [(stretch.wire, own) for stretch, own in found.values() if len(own) == len(stretch.groups)]
    return tuple(_renamed(wire, [own[name] for name in wire.members]) for wire, own in complete)


def _renamed(wire: Any, numbers: Sequence[int]) -> Wire:
    return dataclasses.replace(wire, members=tuple((number,) for number in numbers))


def _made(variable: Any) -> Stored | None:
    beside = variable.get_metadata().get("made")
    return None if beside is None else beside.of(variable.get_raw_value())
