"""Refuses layers of a chain that set the weights that were gathered for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ..hook import Sources
from ..weights import Gathered
from ._layer import value_of
from ._outputs import Written

Paths = dict[tuple[Any, ...], list[Any]]


def refuse_set_weights(before: Paths, after: Paths, again: Callable[[list[Any]], Paths], name: str) -> None:
    """Checks that a call has set no gathered weight.

    `nnx.remat` and `nnx.jit` put new arrays into all variables. If there are new arrays, the call is traced again, and
    its jaxpr shows which of them are those that the variables had.

    Args:
        before: what `weights_of` returned before the call.
        after: what it returned after the call.
        again: repeats the call with other arrays in place of those of `before`, and returns what `weights_of` returns
            after it.
        name: the name of the module in error messages.

    Raises:
        ValueError: if the call has set a weight; the message names it.
    """
    if {path: list(map(id, arrays)) for path, arrays in before.items()} == {
        path: list(map(id, arrays)) for path, arrays in after.items()
    }:
        return
    given = [array for arrays in before.values() for array in arrays]
    sources = Sources(jax.make_jaxpr(lambda arrays: list(again(arrays).values()))(given).jaxpr)
    found, first = {}, 0
    for path, arrays in after.items():
        found[path] = [sources.input_of(first + i) for i in range(len(arrays))]
        first += len(arrays)
    first = 0
    for path, arrays in before.items():
        if found.get(path) != list(range(first, first + len(arrays))):
            raise ValueError(
                f"a call of {name} sets or replaces the weight {'.'.join(map(str, path))}. A step updates the weights "
                "that it received, so this would be lost. Set weights between steps, or hold what calls write in an "
                "`nnx.Variable` of a type of its own."
            )
        first += len(arrays)


def weights_of(variables: Written) -> Paths:
    """Returns the arrays of the gathered weights in a layer's variables, by path."""
    values = {path: value_of(variable) for path, variable in variables.items()}
    return {path: jax.tree.leaves(value.weight) for path, value in values.items() if isinstance(value, Gathered)}


def with_weights(values: Mapping[int, Any], arrays: Sequence[Any]) -> dict[int, Any]:
    """Returns the values of a layer's variables with other arrays in its gathered weights.

    Args:
        values: the values, by index among the layer's leaves.
        arrays: the arrays, in the order of `weights_of`.
    """
    left = iter(arrays)
    put = lambda weight: jax.tree.map(lambda _: next(left), weight)  # noqa: E731
    return {
        i: dataclasses.replace(value, weight=put(value.weight)) if isinstance(value, Gathered) else value
        for i, value in sorted(values.items())
    }
