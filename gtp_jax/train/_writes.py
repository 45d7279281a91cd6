"""Refuses losses that write what a step does not take back: parameters, frozen weights, variables that a call creates,
and numbers that are plain attributes and count calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx

from ..hook import inputs_returned
from ..mesh import Path
from ..nn import Frozen

_REMEDY = (
    "A step updates the parameters that it received, so this would be lost. Hold what calls write, such as the weights "
    "of a target network, in an `nnx.Variable` of a type of its own (`class Target(nnx.Variable)`), which `train_step` "
    "keeps and does not train; or write parameters between steps, in a `jax.jit` of your own that returns the state "
    "with other `params`. To change them for this loss only, change a copy of the model, `nnx.clone(model)`."
)


_HOLD = (
    "A step keeps only the variables that a model had before, so this would be lost. Create it in `__init__` as an "
    "`nnx.Variable` or a subclass, and write its value in calls. An `nnx.Intermediate`, as of `sow`, is dropped."
)


class _Held(NamedTuple):
    """Records the value of a variable.

    Attributes:
        variable: the variable, a parameter or a frozen weight.
        value: its value, which is kept so that no other array gets the same `id`.
        leaves: what identifies each leaf of its value. A weight that is stored as codes has several.
    """

    variable: nnx.Variable
    value: Any
    leaves: list[Any]


def without_writes[T](make: Callable[[], Any], compute: Callable[[Any], T]) -> tuple[Any, T]:
    """Returns a model, and what is computed with it. The computation may write variables of the model, except
    parameters and frozen weights.

    `nnx.jit` and `nnx.remat` put new arrays into all variables. If there are new arrays, the computation is traced
    again, and its jaxpr shows which of them are those that the variables had.

    Args:
        make: a function that makes the model, in the trace that is under way.
        compute: a function of the model, such as a loss.

    Raises:
        ValueError: if the computation sets, replaces, removes or creates a parameter or a frozen weight, creates
            another variable than an `nnx.Intermediate`, or changes a number that is a plain attribute, differently in
            each call; the message names the first.
    """
    model = make()
    before, others, numbers = _held(model), _others(model), _numbers(model)
    computed = compute(model)
    if _changed(before, _held(model)):
        before, after = _traced(make, compute, [held.value for held in before.values()])
        for path, what in _changed(before, after).items():
            kind = type((before.get(path) or after[path]).variable).__name__
            raise ValueError(f"the loss, or a call in it, {what} the {kind} {'.'.join(path)}. {_REMEDY}")
    known = set(map(id, others.values()))
    for path, variable in _others(model).items():
        if path not in others and id(variable) not in known:
            kind = type(variable).__name__
            raise ValueError(f"the loss, or a call in it, creates the {kind} {'.'.join(path)}. {_HOLD}")
    if numbers != _numbers(model):
        _refuse_counters(make, compute)
    return model, computed


def _refuse_counters(make: Callable[[], Any], compute: Callable[[Any], Any]) -> None:
    """Raises an error if a second computation changes numbers that the first has changed. What a call sets to the same
    number each time, such as a length, may be lost."""
    found: list[dict[Path, Any]] = []

    def twice() -> None:
        model = make()
        for _ in range(2):
            compute(model)
            found.append(_numbers(model))

    jax.make_jaxpr(twice)()
    for path, number in found[0].items():
        if found[1].get(path) != number:
            raise ValueError(f"the loss, or a call in it, changes the attribute {'.'.join(path)}, a number. {_HOLD}")


def _others(model: Any) -> dict[Path, nnx.Variable]:
    """Returns the variables that a step takes back, and those that it would not know, by path."""
    return {
        tuple(map(str, path)): node
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Variable) and not isinstance(node, nnx.Param | nnx.Intermediate | Frozen)
    }


def _numbers(model: Any) -> dict[Path, Any]:
    """Returns the plain attributes that are numbers, by path."""
    return {
        (*map(str, path), name): value
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Module)
        for name, value in vars(node).items()
        if type(value) in (int, float)
    }


def _held(model: Any) -> dict[Path, _Held]:
    """Returns what a step does not take back from a model, by path. A leaf is identified by its `id`."""
    nodes = ((tuple(map(str, path)), node) for path, node in nnx.iter_graph(model))
    return {
        path: _Held(node, value := node.get_raw_value(), list(map(id, jax.tree.leaves(value))))
        for path, node in nodes
        if isinstance(node, nnx.Param | Frozen)
    }


def _changed(before: dict[Path, _Held], after: dict[Path, _Held]) -> dict[Path, str]:
    """Returns what has been done to variables that do not hold what they held, by path. If a variable has only got
    another path, as by a second reference to its module, nothing has been done to it."""
    left, known = ({leaf for held in each.values() for leaf in held.leaves} for each in (after, before))
    changed = {}
    for path, held in before.items():
        if path not in after:
            if not left.issuperset(held.leaves):
                changed[path] = "replaces or removes"
        elif held.leaves != after[path].leaves:
            changed[path] = "sets"
    new = {path: "creates" for path, held in after.items() if path not in before and not known.issuperset(held.leaves)}
    return changed | new


def _traced(
    make: Callable[[], Any], compute: Callable[[Any], Any], given: list[Any]
) -> tuple[dict[Path, _Held], dict[Path, _Held]]:
    """Traces a computation, and returns what variables hold before and after it. An array is identified by the number
    of the array that it was before; a new array, by `None`.

    Args:
        make: a function that makes the model.
        compute: a function of the model.
        given: the values of the variables.
    """
    found: list[dict[Path, _Held]] = []

    def values(arrays: list[Any]) -> list[Any]:
        model = make()
        for held, value in zip(_held(model).values(), arrays, strict=True):
            held.variable.set_raw_value(value)
        before = _held(model)
        compute(model)
        found[:] = before, _held(model)
        return [held.value for held in found[1].values()]

    returned = iter(inputs_returned(values, given))
    before, after = found
    numbers = iter(range(sum(len(held.leaves) for held in before.values())))
    return (
        {path: held._replace(leaves=[next(numbers) for _ in held.leaves]) for path, held in before.items()},
        {path: held._replace(leaves=[next(returned) for _ in held.leaves]) for path, held in after.items()},
    )
