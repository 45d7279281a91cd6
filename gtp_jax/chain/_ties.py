"""Ties arrays: makes arrays wait until other arrays are available, without changing values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from ..collectives import Turn, tied

Tree = Any


def is_float(leaf: Any) -> bool:
    """Returns whether an array has an inexact dtype, and so a gradient."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def is_real(leaf: Any) -> bool:
    """Returns whether a value is an array that is neither made of random keys nor float0."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and dtype != jax.dtypes.float0 and not jnp.issubdtype(dtype, jax.dtypes.extended)


def together(*trees: Tree) -> tuple[Tree, ...]:
    """Returns the same values through an optimization barrier: none of them is available before all are. Random keys,
    float0 arrays and non-arrays are not tied."""
    return _with_arrays(lax.optimization_barrier, trees)


def tied_trees(tree: Tree, turn: Turn) -> Tree:
    """Returns the same values, but not before the turn is available."""
    return _with_arrays(lambda arrays: tied(arrays, turn), tree)


def _with_arrays(change: Callable[[list[Any]], list[Any]], tree: Tree) -> Tree:
    """Replaces the arrays of a tree with what `change` returns for them."""
    leaves, structure = jax.tree.flatten(tree)
    real = [i for i, leaf in enumerate(leaves) if is_real(leaf)]
    if real:
        for i, leaf in zip(real, change([leaves[i] for i in real]), strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(structure, leaves)


def mapped_with(outputs: Any, inputs: Sequence[Any]) -> Any:
    """Returns the outputs of a `custom_vjp`. Inside a `jax.vmap`, makes all outputs of inexact dtypes batched if any of
    them, or any input, is batched. Inputs that are random keys or float0 arrays do not count.

    Otherwise, JAX may not support the gradient of an unbatched output, such as a zero, with respect to unbatched
    inputs: jax 0.12 may raise an error, and jax 0.11 may count the output's gradient once per index.

    Args:
        outputs: the outputs, a pytree of arrays.
        inputs: the inputs.
    """
    leaves, tree = jax.tree.flatten(outputs)
    floats = [i for i, leaf in enumerate(leaves) if is_real(leaf) and is_float(leaf)]
    mapped = _mapped([leaves[i] for i in floats], [leaf for leaf in inputs if is_real(leaf)])
    for i, leaf in zip(floats, mapped, strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(tree, leaves)


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
