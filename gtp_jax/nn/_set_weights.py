"""Refuses layers of a chain that write their parameters or the weights that were gathered for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from ..hook import inputs_returned
from ..variables import Leaf, leaves_of, raw_value
from ..weights import Gathered
from ._layer import layout_of

# The arrays that variables and plain attributes hold, by path.
Held = dict[tuple[Any, ...], list[Any]]


def is_weight(leaf: Leaf) -> bool:
    """Returns whether a leaf of a layer is a parameter or a gathered weight, frozen ones included."""
    return isinstance(leaf, nnx.Param) or layout_of(leaf) is not None  # a frozen weight is not an `nnx.Param`


def held_in(leaves: Mapping[tuple[Any, ...], Leaf], *, weights: bool) -> Held:
    """Returns the arrays that the weights among a layer's leaves hold, or those that the other leaves hold."""
    return {path: jax.tree.leaves(_arrays(leaf)) for path, leaf in leaves.items() if is_weight(leaf) is weights}


def with_weights(layer: nnx.Module, arrays: Sequence[Any]) -> nnx.Module:
    """Puts other arrays, in the order of `held_in`, into a layer's weights, and returns the layer."""
    left = iter(arrays)
    for variable in filter(is_weight, leaves_of(layer).values()):
        value, put = variable.get_raw_value(), jax.tree.map(lambda _: next(left), _arrays(variable))
        variable.set_raw_value(dataclasses.replace(value, weight=put) if isinstance(value, Gathered) else put)
    return layer


def refuse_set_weights(before: Held, after: Held, again: Callable[[list[Any]], Held], name: str) -> None:
    """Checks that a call of a layer has written no weight.

    `nnx.remat` and `nnx.jit` put new arrays into all variables. If there are new arrays, the call is traced again, and
    its jaxpr shows which of them are those that the variables had.

    Args:
        before: what `held_in` returned for the weights before the call.
        after: what it returned after the call.
        again: replaces the arrays of `before` with others, repeats the call, and returns what `held_in` returns then.
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


def _arrays(leaf: Leaf) -> Any:
    value = raw_value(leaf)
    return value.weight if isinstance(value, Gathered) else value


def _ids(arrays: Held) -> dict[tuple[Any, ...], list[int]]:
    return {path: list(map(id, each)) for path, each in arrays.items()}
