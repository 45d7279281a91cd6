"""Tells floats, which have gradients, from other leaves, and separates them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


def is_float(value: Any) -> bool:
    """Returns whether a value is an array, or a number, of an inexact dtype, and so has a gradient."""
    return jnp.issubdtype(getattr(value, "dtype", type(value)), jnp.inexact)


def is_real(leaf: Any) -> bool:
    """Returns whether a value is an array that is neither made of random keys nor float0."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and dtype != jax.dtypes.float0 and not jnp.issubdtype(dtype, jax.dtypes.extended)


def separated[T](leaves: Iterable[T], chosen: Sequence[bool]) -> tuple[list[T], list[T]]:
    """Returns the leaves that are chosen, and the others; see `joined`."""
    each = list(zip(leaves, chosen, strict=True))
    return [leaf for leaf, own in each if own], [leaf for leaf, own in each if not own]


def joined[T](ones: Iterable[T], others: Iterable[T], chosen: Sequence[bool]) -> list[T]:
    """Returns the leaves of which `ones` are chosen and `others` are not, in their order."""
    of_chosen, rest = iter(ones), iter(others)
    return [next(of_chosen) if own else next(rest) for own in chosen]


def with_changed(tree: Tree, is_changed: Callable[[Any], bool], change: Callable[[list[Any]], Sequence[Any]]) -> Tree:
    """Returns a tree with what `change` returns for some of its leaves.

    Args:
        tree: the tree.
        is_changed: returns whether a leaf is one of them.
        change: a function of the list of these leaves. It is not called if there are none.
    """
    leaves, structure = jax.tree.flatten(tree)
    chosen = list(map(is_changed, leaves))
    ones, others = separated(leaves, chosen)
    return jax.tree.unflatten(structure, joined(change(ones) if ones else [], others, chosen))
