"""Refuses calls that change plain attributes of a layer's copy, because the change would be lost with the copy."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

# The nodes of a module, each with its path and, by name, the forms of its attributes (see `_form`).
Attributes = Sequence[tuple[tuple[Any, ...], nnx.Pytree, dict[str, Any]]]

# The form of variables and arrays. Whether a call may write these is not checked here.
_ARRAY = object()


def attributes_of(module: nnx.Module) -> Attributes:
    """Returns what the attributes of a module, and of the nodes within it, hold before a call."""
    return [(path, node, _forms(node)) for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Pytree)]


def refuse_set_attributes(before: Attributes, name: str) -> None:
    """Checks that a call has changed no plain attribute.

    Setting an attribute to an equal value is no change. A list, tuple, dict or set that the call has changed in place
    is one; any other object counts as changed only if the attribute holds another object that is not equal.

    Args:
        before: what `attributes_of` returned before the call.
        name: the name of the module in error messages.

    Raises:
        ValueError: if the call has set an attribute to another value, changed it in place, or deleted it.
    """
    for path, node, had in before:
        has = _forms(node)
        for attribute in {**had, **has}:
            if has.get(attribute) is _ARRAY or not _differs(had.get(attribute), has.get(attribute)):
                continue
            how = "changes" if attribute in has else "deletes"
            raise ValueError(
                f"a call of {name} {how} the attribute {'.'.join(map(str, (*path, attribute)))}, which is not a "
                "variable. The call is made on a copy of the module, so the change would be lost. Hold the value in "
                "an `nnx.Variable` that is made in `__init__`, or compute it there."
            )


def _forms(node: nnx.Pytree) -> dict[str, Any]:
    return {
        name: _form(value)
        for name, value in vars(node).items()
        if not name.startswith("_pytree__")
        and not isinstance(getattr(type(node), name, None), functools.cached_property)  # it is computed again
    }


def _form(value: Any) -> Any:
    """Returns what `==` compares with a later form of the same attribute. Containers are copied, because a call may
    change them in place. Nodes are equal if they are the same object."""
    if isinstance(value, nnx.Variable | jax.Array | np.ndarray):
        return _ARRAY
    if isinstance(value, nnx.Pytree):
        return nnx.Pytree, id(value)
    if isinstance(value, dict):
        return type(value), {key: _form(one) for key, one in value.items()}
    if isinstance(value, list | tuple | deque):
        return type(value), [_form(one) for one in value]
    return type(value), set(value) if isinstance(value, set) else value


def _differs(one: Any, other: Any) -> bool:
    try:
        return bool(one != other)
    except ValueError:  # an object with arrays
        return True
