"""Finds arrays of a state that were donated or have no values, and arrays that share memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ..mesh import Path, with_paths

Tree = Any


def check_held(state: Tree) -> None:
    """Refuses a state whose arrays were donated to a step.

    Raises:
        ValueError: if an array was donated; the message names one.
    """
    if not any(_is_held(leaf) and leaf.is_deleted() for leaf in jax.tree.leaves(state)):
        return
    path = next(path for path, leaf in with_paths(state) if _is_held(leaf) and leaf.is_deleted())
    raise ValueError(
        f"`state` was passed to a step before, or its array {'.'.join(path)!r} was donated elsewhere: a step donates "
        "the arrays of its state. Go on with the state that the step returned, `state, metrics = step(state, batch)`; "
        "to keep an old state, copy it before the step: `jax.tree.map(jnp.copy, state)`."
    )


def check_values(state: Tree) -> None:
    """Refuses a state whose arrays were donated to a step, and an abstract state, which has shapes but no values.

    Raises:
        ValueError: if the state is refused; the message names an array.
    """
    check_held(state)
    if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state)):
        return
    path = next(path for path, leaf in with_paths(state) if isinstance(leaf, jax.ShapeDtypeStruct))
    raise ValueError(
        f"`state` has no values, only shapes and dtypes, such as at {'.'.join(path)!r}: it was made from an "
        "abstract model. Make it from `gtp_jax.init(...)`, or restore it; without values a step can only be traced, by "
        "its methods `lower`, `trace` and `eval_shape`."
    )


def shared(tree: Tree) -> dict[Path, Path]:
    """Finds arrays that share memory.

    Returns:
        For each array that shares its memory with an earlier array of the tree, by path: the path of the first array in
        that memory. Ignores arrays that are traced, donated or empty.
    """
    first: dict[Any, Path] = {}
    found = {}
    for path, leaf in with_paths(tree):
        if not _is_held(leaf) or leaf.is_deleted() or not leaf.size:
            continue
        shards = leaf.addressable_shards
        memory = (shards[0].device, shards[0].data.unsafe_buffer_pointer()) if shards else id(leaf)
        if first.setdefault(memory, path) != path:
            found[path] = first[memory]
    return found


def distinct(tree: Tree) -> Tree:
    """Copies every array that shares its memory with an earlier array of the tree, because a step cannot donate one
    buffer twice.

    Two parameters share memory if the same array was assigned to both, for example by
    `nnx.update(model.target, nnx.state(model.online))`.
    """
    copied = shared(tree)
    leaves = [jnp.copy(leaf) if path in copied else leaf for path, leaf in with_paths(tree)]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def check_distinct(tree: Tree) -> None:
    """Refuses a tree in which two arrays share memory.

    Raises:
        ValueError: if two arrays share memory; the message names both.
    """
    for path, before in shared(tree).items():
        raise ValueError(
            f"`state` holds one array twice: {'.'.join(before)!r} and {'.'.join(path)!r}, and a step donates the "
            "memory of each. Copy one of them with `jnp.copy`; `TrainState.create` does so for a model with one array "
            "in two parameters."
        )


def _is_held(leaf: Any) -> bool:
    """Returns whether a leaf is a concrete array, neither traced nor abstract. It may have been donated."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
