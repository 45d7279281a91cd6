"""Tells the logical shape of a weight, and how products use its matrix; see [Note: seen as a matrix]."""

from __future__ import annotations

from typing import Any

from ..layout import Matrix, Placement
from ..mesh import current_view
from ._products import Factor, Runs


def logical_shape(array: Any, placement: Placement) -> tuple[int, ...]:
    """Returns the logical shape of a weight, given its array; outside of global view, the array counts as a shard."""
    shape = tuple(array.shape)
    if current_view() != "global":
        shape = tuple(size * placement.parts(dim) for dim, size in enumerate(shape))
    return placement.without_padding(shape)


def in_order_of(seen: Matrix, factor: Factor) -> bool:
    """Returns whether a product contracts a weight's input features and keeps its output features, both in their order
    in the weight."""
    inputs, outputs = seen.layout.shape
    return (factor.contracted, factor.kept) == (_run(outputs, inputs), _run(1, outputs))


def turned(seen: Matrix, factor: Factor) -> bool:
    """Returns whether a product contracts a weight's output features and keeps its input features, both in their order
    in the weight."""
    inputs, outputs = seen.layout.shape
    return (factor.contracted, factor.kept) == (_run(1, outputs), _run(outputs, inputs))


def _run(stride: int, size: int) -> Runs:
    return () if size == 1 else ((stride, size),)
