"""Paths of leaves, and which parameter an optimizer's array belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

Path = tuple[str, ...]


def with_paths(tree: Any, is_leaf: Any = None) -> list[tuple[Path, Any]]:
    """Returns a pytree's leaves, each with its keys as strings, in the order of `jax.tree.leaves`."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [(tuple(jax.tree_util.keystr((key,), simple=True) for key in path), leaf) for path, leaf in flat]


def of_parameter[T](path: Path, parameters: Mapping[Path, T]) -> T | None:
    """Returns what `parameters` holds for the parameter that an optimizer's array at `path` belongs to, if it does.

    Optax keeps such arrays in trees of the parameters' structure, whole or masked, so their paths end with the
    parameter's own.
    """
    return next((parameters[path[start:]] for start in range(len(path)) if path[start:] in parameters), None)
