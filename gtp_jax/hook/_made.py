"""Keeps what a step has made for sharded weights, for the calls of the step: codes, keys of stochastic rounding, and
amaxes of earlier steps. They are metadata of the weights' variables.

[Note: once per step]
A step quantizes the weights once, for all of its microbatches. The codes belong to the arrays that the model holds at
that time. A call may find another array in a variable, because code has put it there, or because a transformation calls
the module with its own arrays (a scan over stacked weights, `nnx.remat`). The call then quantizes the array that it
finds.

The codes of a weight are named after its path in the model of the step (`place_name`). Its path in the model that was
sharded (`path_of`) is not always unique: copies of a sharded module share it, and models that were sharded one by one
may share it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from ..weights import (
    Beside,
    CallKeys,
    Holds,
    ModulePath,
    Scaling,
    Stored,
    Stretch,
    Wire,
    key_for,
    scaling_of_replaced,
)
from ._codes import Coded
from ._path import path_of
from ._placement import placement_of
from ._recording import original_array


def with_made[M: nnx.Module](
    model: M, codes: Sequence[Stretch], key: jax.Array | None, scaling: Mapping[ModulePath, Scaling]
) -> M:
    """Stores, in the metadata of a model's sharded weights, what a step has made for them. Returns the model.

    Args:
        model: the model, which is changed. It must not outlive the trace of the other arguments.
        codes: what `quantized` returned for a model with the same weights at the same paths.
        key: the key of this step and microbatch, and in local view also of this rank, uint32 `(2,)`. A key for each
            weight is derived from it. `None` if nothing is rounded stochastically.
        scaling: the scaling of each weight that is scaled by amaxes of earlier steps, by its path in the model.
    """
    of_weights = {name[-1]: (stretch,) for stretch in codes for name in stretch.wire.members}
    for place, variable in nnx.iter_graph(model):
        if placement_of(variable) is None:
            continue
        keys = None if key is None else CallKeys(key_for(key, place))
        name = place_name(place)
        if name in of_weights or keys is not None or place in scaling:
            made = Stored(variable.get_raw_value(), (), of_weights.get(name, ()), keys, scaling=scaling.get(place))
            variable.set_metadata(made=Beside(made), made_for=name)
    return model


def place_name(place: Sequence[Any]) -> str:
    """Returns the name of a weight among the codes of a step, given the weight's path in the model of the step."""
    return str(tuple(place))


def keys_of_call(variable: Any) -> CallKeys | None:
    """Returns the keys of a weight for the current call, from which each product with the weight takes a key of its
    own; `None` if the step has made none for the weight. Each call of this function returns other keys."""
    made = _made(variable)
    return None if made is None or made.keys is None else made.keys.for_view()


def scaling_of_call(variable: nnx.Variable, form: Coded | None) -> Scaling | None:
    """Returns how a weight's products are scaled by amaxes of earlier steps; `None` if they are not.

    Args:
        variable: the variable of the weight.
        form: how the weight is quantized; `None` if it is not.

    Raises:
        ValueError: if the step has no amaxes for the weight, or if the call sees a slice of it: the layers of stacked
            weights would have one scale.
    """
    if form is None or not form.is_delayed:
        return None
    made, name = _made(variable), ".".join(path_of(variable))
    if made is None or made.scaling is None:
        raise ValueError(
            f"the recipe scales {name} by amaxes of earlier steps, but the model that is called is not the one that "
            "the step passes to the loss, and has none. Call that one, or this one under "
            "`gtp_jax.hook.without_hook()`, where no recipe applies."
        )
    placement = placement_of(variable)
    assert placement is not None
    if placement.ndim < variable.get_metadata()["placement"].ndim:
        raise ValueError(
            f"the recipe scales {name} by amaxes of earlier steps, but a scan or vmap calls a slice of it, and the "
            "state has one history for the whole weight. Hold each layer's weight in a variable of its own; stack "
            "gtp_jax's own layers with `gtp_jax.Stack`; or use `gtp_jax.FP8(matmuls=True)`, which scales each operand "
            "by its own amax."
        )
    if made.holds is not Holds.REPLACED:
        return made.scaling
    return scaling_of_replaced(made.scaling, (form.layout,), (form.to_matrix(variable.get_raw_value()),))


def wires_of_call(variables: Sequence[Any], formats: Sequence[Coded | None]) -> tuple[Wire, ...]:
    """Returns the codes that the step has made of the weights of a call, as wires. A member of a wire is named
    `(number,)`, after its weight. A wire is returned only if the call uses all of its members, with the arrays that the
    step quantized and in the same formats. The dtypes in which the call uses the weights do not matter.

    Args:
        variables: the variables of the weights.
        formats: how each weight is quantized; `None` for a weight that is not quantized.
    """
    found: dict[int, tuple[Stretch, dict[Any, int]]] = {}
    for number, (variable, form) in enumerate(zip(variables, formats, strict=True)):
        made, known_as = _made(variable), variable.get_metadata().get("made_for")
        if made is None or form is None:
            continue
        for stretch in made.prepared:
            for name, spec in zip(stretch.wire.members, stretch.groups, strict=True):
                if name[-1] == known_as and form.spec(spec.dtype) == spec:
                    found.setdefault(id(stretch), (stretch, {}))[1][name] = number
    complete = [(stretch.wire, own) for stretch, own in found.values() if len(own) == len(stretch.groups)]
    return tuple(_renamed(wire, [own[name] for name in wire.members]) for wire, own in complete)


def _renamed(wire: Any, numbers: Sequence[int]) -> Wire:
    return dataclasses.replace(wire, members=tuple((number,) for number in numbers))


def _made(variable: Any) -> Stored | None:
    made = variable.get_metadata().get("made")
    return None if made is None else made.of(original_array(variable.get_raw_value()))
