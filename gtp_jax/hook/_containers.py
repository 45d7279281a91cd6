"""Finds the lists and dicts among the arguments of a call, which the call may change in place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def containers_of(arguments: Any) -> list[Any]:
    """Returns the lists and dicts among arguments, in an order that depends on their structure alone. Those within
    other types than lists, tuples and dicts are left out."""
    found: list[Any] = []
    if type(arguments) in (list, dict):
        found.append(arguments)
    if isinstance(arguments, list | tuple | dict):
        items = [arguments[key] for key in sorted(arguments)] if isinstance(arguments, dict) else arguments
        for item in items:  # in the order of JAX, which rebuilds a dict with sorted keys
            found += containers_of(item)
    return found


def items_of(container: Any) -> Iterable[Any]:
    """Returns the contents of a list or dict; for a dict, keys and values."""
    return (one for pair in container.items() for one in pair) if isinstance(container, dict) else container


def fill(container: Any, contents: Any) -> None:
    """Gives a list or dict the contents of another."""
    container.clear()
    (container.update if isinstance(container, dict) else container.extend)(contents)
