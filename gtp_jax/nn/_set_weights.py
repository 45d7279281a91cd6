"""Refuses layers of a chain that write their parameters or the weights that were gathered for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from ..hook import inputs_returned
from ..weights import Gathered
from ._layer import layout_of

# The arrays of each parameter or gathered weight, by path.
Held = dict[tuple[Any, ...], list[Any]]


def weights_of(layer: nnx.Module) -> Held:
    """Returns the arrays of a layer's parameters and gathered weights, frozen ones too, by path."""
    return {path: jax.tree.leaves(_arrays(variable)) for path, variable in _weights(layer).items()}


def with_weights(layer: nnx.Module, arrays: Sequence[Any]) -> nnx.Module:
    """Puts other arrays, in the order of `weights_of`, into a layer's weights, and returns the layer."""
    left = iter(arrays)
    for variable in _weights(layer).values():
        value, put = variable.get_raw_value(), jax.tree.map(lambda _: next(left), _arrays(variable))
        variable.set_raw_value(dataclasses.replace(value, weight=put) if isinstance(value, Gathered) else put)
    return layer


def refuse_set_weights(before: Held, after: Held, again: Callable[[list[Any]], Held], name: str) -> None:
    """Checks that a call of a layer has written no weight.

    `nnx.remat` and `nnx.jit` put new arrays into all variables. If there are new arrays, the call is traced again, and
    its jaxpr shows which of them are those that the variables had.

    Args:
        before: what `weights_of` returned before the call.
        after: what it returned after the call.
        again: replaces the arrays of `before` with others, repeats the call, and returns what `weights_of` returns
            then.
        name: the name of the module in error messages.

    Raises:
        ValueError: if the call has set, replaced, removed or created a weight; the message names it.
    """
    if _ids(before) == _ids(after):
        return
    given = [array for arrays in before.values() for array in arrays]
    numbers = iter(range(len(given)))
    returned = iter(inputs_returned(lambda arrays: list(again(arrays).values()), given))
    held = {path: [next(numbers) for _ in arrays] for path, arrays in before.items()}
    found = {path: [next(returned) for _ in arrays] for path, arrays in after.items()}
    wrong = next((path for path in (*held, *found) if held.get(path) != found.get(path)), None)
    if wrong is not None:
        raise ValueError(
            f"a call of {name} writes the parameter {'.'.join(map(str, wrong))}. The optimizer updates parameters, so "
            "this would be lost. A layer of a chain may write only other variables, such as `nnx.BatchStat` or an "
            "`nnx.Variable` of a type of its own."
        )


def _weights(layer: nnx.Module) -> dict[tuple[Any, ...], nnx.Variable]:
    return {
        path: node
        for path, node in nnx.iter_graph(layer)
        if isinstance(node, nnx.Param)
        or (isinstance(node, nnx.Variable) and layout_of(node) is not None)  # a frozen weight is not an `nnx.Param`
    }


def _arrays(variable: nnx.Variable) -> Any:
    value = variable.get_raw_value()
    return value.weight if isinstance(value, Gathered) else value


def _ids(arrays: Held) -> dict[tuple[Any, ...], list[int]]:
    return {path: list(map(id, each)) for path, each in arrays.items()}
