"""Finds the paths of leaves, and the parameter that an optimizer's array belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

Path = tuple[str, ...]


def with_paths(tree: Any, is_leaf: Any = None) -> list[tuple[Path, Any]]:
    """Returns the leaves of a pytree with their paths, whose keys are strings, in the order of `jax.tree.leaves`."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [(tuple(jax.tree_util.keystr((key,), simple=True) for key in path), leaf) for path, leaf in flat]


def of_parameter[T](path: Path, parameters: Mapping[Path, T]) -> T | None:
    """Returns the entry of `parameters` for the parameter that an optimizer's array at `path` belongs to, or `None`.

    Optax keeps such arrays in trees of the parameters' structure, whole or masked, so their paths end with the path of
    the parameter. Where an optimizer keeps one array per dimension (SM3), its number follows that path.
    """
    for own in (path, path[:-1]) if path and path[-1].isdigit() else (path,):
        for start in range(len(own)):
            if own[start:] in parameters:
                return parameters[own[start:]]
    return None
