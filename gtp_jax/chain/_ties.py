"""Ties arrays: makes arrays wait until other arrays are available, without changing values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from ..collectives import Turn, tied
from ._floats import is_float, is_real, with_changed

Tree = Any


def together(*trees: Tree) -> tuple[Tree, ...]:
    """Returns the same values through an optimization barrier: none of them is available before all are. Random keys,
    float0 arrays and non-arrays are not tied."""
    return with_changed(trees, is_real, lax.optimization_barrier)


def tied_trees(tree: Tree, turn: Turn) -> Tree:
    """Returns the same values, but not before the turn is available."""
    return with_changed(tree, is_real, lambda arrays: tied(arrays, turn))


def mapped_with(outputs: Any, inputs: Sequence[Any]) -> Any:
    """Returns the outputs of a `custom_vjp`. Inside a `jax.vmap`, makes all outputs of inexact dtypes batched if any of
    them, or any input, is batched. Inputs that are random keys or float0 arrays do not count.

    Otherwise, JAX may not support the gradient of an unbatched output, such as a zero, with respect to unbatched
    inputs: jax 0.12 may raise an error, and jax 0.11 may count the output's gradient once per index.

    Args:
        outputs: the outputs, a pytree of arrays.
        inputs: the inputs.
    """
    real = [leaf for leaf in inputs if is_real(leaf)]
    return with_changed(outputs, is_float, lambda floats: _mapped(floats, real))


@jax.custom_jvp
def _mapped(outputs: list[Any], inputs: list[Any]) -> list[Any]:
    return _broadcast_inside_vmap(outputs, inputs)


@_mapped.defjvp
def _mapped_jvp(primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
    return _mapped(*primals), tangents[0]


@custom_vmap
def _broadcast_inside_vmap(outputs: list[Any], inputs: list[Any]) -> list[Any]:
    del inputs
    return outputs


@_broadcast_inside_vmap.def_vmap
def _broadcast(size: int, batched: Any, outputs: list[Any], inputs: list[Any]) -> tuple[list[Any], list[bool]]:
    every = any(jax.tree.leaves(batched))
    whole = [
        jnp.broadcast_to(x, (size, *x.shape)) if every and not mapped else x
        for x, mapped in zip(outputs, batched[0], strict=True)
    ]
    return _mapped(whole, inputs), [every for _ in whole]
