"""Tells an optimizer, while it is called, which of its arrays hold the layers of a `Stack`, and how they lie on the
mesh."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from ..mesh import Path, of_parameter, with_paths

Tree = Any


class Placed(NamedTuple):
    """How an array that an optimizer is given for a parameter lies on the mesh.

    Attributes:
        shape: the shape of the array.
        spec: its partition. If the axes do not divide a dimension evenly, the last parts are smaller.
    """

    shape: tuple[int, ...]
    spec: PartitionSpec


class _Scope(NamedTuple):
    counts: Mapping[Path, int] | None = None
    examined: bool = False
    placed: Mapping[Path, Placed] | None = None


_NOTHING = _Scope()  # outside of an update
_scope: contextvars.ContextVar[_Scope] = contextvars.ContextVar("an optimizer's arrays", default=_NOTHING)


@contextlib.contextmanager
def arrays_in_scope(
    counts: Mapping[Path, int], *, examined: bool = False, placed: Mapping[Path, Placed] | None = None
) -> Iterator[None]:
    """Puts in scope what an optimizer may ask about the arrays of parameters.

    Args:
        counts: the number of layers of each parameter, by path; 0 for a parameter outside a `Stack`.
        examined: whether `per_layer` only checks its optimizer's update, and then returns the updates and the state
            that it got. A trace of the update then shows only the transformations around `per_layer`.
        placed: how the arrays of each parameter lie on the mesh, by path. `None` for one device, and for an update that
            is traced only to be read: what reads it expects that the update of a parameter does not depend on the
            others.
    """
    token = _scope.set(_Scope(counts, examined, placed))
    try:
        yield
    finally:
        _scope.reset(token)


def counts_in_scope() -> Mapping[Path, int] | None:
    """Returns the number of layers of each parameter, by path; `None` outside of the update of a step."""
    return _scope.get().counts


def is_examined() -> bool:
    """Returns whether an update is traced only to see which of its operations treat stacked layers as one tensor."""
    return _scope.get().examined


def placed_in(tree: Tree) -> list[Placed | None]:
    """Returns how each leaf of an optimizer's tree lies on the mesh; `None` on one device, and if it is not known: in a
    step that `train_step` did not make, or if the leaf does not have the shape of its parameter."""
    known = _scope.get().placed
    if known is None:
        return [None for _ in with_paths(tree)]
    found = [(of_parameter(path, known), leaf) for path, leaf in with_paths(tree)]
    return [one if one is not None and one.shape == leaf.shape else None for one, leaf in found]


def placed_of_one_layer(counts: Mapping[Path, int]) -> dict[Path, Placed] | None:
    """Returns what is in scope, for the arrays of one layer of each stack.

    Args:
        counts: the number of layers of each parameter, by path; 0 outside a `Stack`.
    """
    known = _scope.get().placed
    if known is None:
        return None
    found = {path: of_parameter(path, known) for path in counts}
    return {
        path: Placed(one.shape[1:], PartitionSpec(*one.spec[1:])) if counts[path] else one
        for path, one in found.items()
        if one is not None
    }
