"""Moves the activations that a layer saves for backward to the host's memory, and back."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ._floats import is_float

Tree = Any

_INPUT = 3  # the position of the layer's input among the operands of `Stage.apply`


@jax.tree_util.register_static
class _Away:
    """Replaces, in a residual, an array that has been moved to the host."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Away)

    def __hash__(self) -> int:
        return hash(_Away)


def without_activations(closure: Any) -> tuple[Any, list[jax.Array], int]:
    """Splits a layer's residual for offloading.

    Activations are the float arrays, except scalars, among the layer's input and the values computed in the layer. The
    weights and parameters that the layer received stay in the residual.

    Returns:
        The residual without its activations; the activations, those of the layer's input first; and how many of them
        belong to the input.
    """
    leaves, tree = _leaves(closure)
    away = [isinstance(leaf, jax.Array) and np.ndim(leaf) > 0 and is_float(leaf) for leaf in leaves]
    rest = [_Away() if moves else leaf for leaf, moves in zip(leaves, away, strict=True)]
    moved = [leaf for leaf, moves in zip(leaves, away, strict=True) if moves]
    return _with(closure, tree, rest), moved, sum(away[: len(jax.tree.leaves(closure.args_res[_INPUT]))])


def with_activations(closure: Any, arrays: list[jax.Array]) -> Any:
    """Returns the residual with its activations put back."""
    leaves, tree = _leaves(closure)
    back = iter(arrays)
    return _with(closure, tree, [next(back) if isinstance(leaf, _Away) else leaf for leaf in leaves])


def to_host(arrays: list[jax.Array]) -> list[jax.Array]:
    """Returns copies in the host's pinned memory. Programs for CPUs copy nothing, because all memory spaces
    of a CPU are the same memory."""
    return [jax.device_put(a, jax.memory.Space.Host) for a in arrays]


def to_device(arrays: list[jax.Array]) -> list[jax.Array]:
    """Returns copies in the device's memory."""
    return [jax.device_put(a, jax.memory.Space.Device) for a in arrays]


def _leaves(closure: Any) -> tuple[list[Any], Any]:
    is_mark = lambda leaf: isinstance(leaf, _Away)  # noqa: E731
    return jax.tree.flatten((closure.args_res[_INPUT], closure.opaque_residuals), is_leaf=is_mark)


def _with(closure: Any, tree: Any, leaves: list[Any]) -> Any:
    x, others = jax.tree.unflatten(tree, leaves)
    operands = list(closure.args_res)
    operands[_INPUT] = x
    return closure.replace(args_res=operands, opaque_residuals=others)
