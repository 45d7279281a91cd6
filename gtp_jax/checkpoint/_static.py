"""Collects a state's static fields, such as the format of codes."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax
import numpy as np

from ..formats import Format
from ..mesh import Path, with_paths

# Types whose repr is complete. Others (functions, meshes, layouts) define how the run computes, not what arrays mean.
_PLAIN = (str, bytes, bool, int, float, enum.Enum, np.dtype, Format, type(None))


def static_fields(state: Any) -> dict[str, str]:
    """Returns the static fields of the dataclasses within a state, as text, by their paths joined by slashes.

    They are needed because codes of two formats may have the same shape and dtype. Fields of types without a complete
    `repr`, such as functions, are left out.
    """
    return {"/".join(path): text for path, text in _below((), state)}


def _below(path: Path, tree: Any) -> list[tuple[Path, str]]:
    fields = []
    for keys, node in with_paths(tree, is_leaf=lambda x: x is not tree and _is_node(x)):
        if node is tree or not _is_node(node):
            continue
        here = (*path, *keys)
        children = {getattr(key, "name", None) for key, _ in jax.tree_util.flatten_one_level_with_keys(node)[0]}
        for field in dataclasses.fields(node):
            value = getattr(node, field.name)
            if field.name not in children and _is_plain(value):
                fields.append(((*here, field.name), repr(value)))
        fields += _below(here, node)
    return fields


def _is_node(x: Any) -> bool:
    return dataclasses.is_dataclass(x) and not jax.tree_util.all_leaves([x])


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, _PLAIN)
