"""Records what the layers of chains move to the host's memory, while a function is traced."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from ..mesh import current_view


class Moved(NamedTuple):
    """The arrays that one layer moves, as they were traced.

    Attributes:
        source: the name of the module that the layer belongs to.
        per_device: whether the shapes are those of one rank's part, instead of global ones.
        x: the layer's input.
        arrays: what is moved.
        inputs: how many of these arrays, the first ones, are the input.
    """

    source: str
    per_device: bool
    x: tuple[jax.ShapeDtypeStruct, ...]
    arrays: tuple[jax.ShapeDtypeStruct, ...]
    inputs: int


_RECORD: contextvars.ContextVar[list[Moved] | None] = contextvars.ContextVar("gtp_jax_offloads", default=None)


@contextlib.contextmanager
def offloads_recorded() -> Iterator[list[Moved]]:
    """Yields a list of what layers move. Every layer that is traced in this context, in a forward pass that is followed
    by a backward pass, adds an entry. The layers of a loop are traced once for all of them."""
    found: list[Moved] = []
    token = _RECORD.set(found)
    try:
        yield found
    finally:
        _RECORD.reset(token)


def record_offload(source: str, x: Any, arrays: list[jax.Array], inputs: int) -> None:
    """Adds what a layer moves to the record in scope, if there is one.

    Args:
        source: the name of the module that the layer belongs to.
        x: its input, a pytree of arrays.
        arrays: the arrays that it moves.
        inputs: how many of these, the first ones, are the input.
    """
    found = _RECORD.get()
    if found is not None:
        moved = (_shapes(jax.tree.leaves(x)), _shapes(arrays), inputs)
        found.append(Moved(source, current_view() != "global", *moved))


def _shapes(arrays: list[jax.Array]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays)
