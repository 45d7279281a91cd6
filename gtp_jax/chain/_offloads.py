"""Records, while a function is traced, which arrays the layers of chains move to the host's memory."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from ..mesh import current_view


class Moved(NamedTuple):
    """The shapes and dtypes of the arrays that one layer moves to the host's memory, as they were traced.

    Attributes:
        source: the name of the module that the layer belongs to.
        per_device: whether the shapes are those of one rank's part, instead of global ones.
        x: the arrays of the layer's input.
        arrays: the arrays that are moved, those of the input first.
        inputs: the number of `arrays` that belong to the input.
    """

    source: str
    per_device: bool
    x: tuple[jax.ShapeDtypeStruct, ...]
    arrays: tuple[jax.ShapeDtypeStruct, ...]
    inputs: int


_RECORD: contextvars.ContextVar[list[Moved] | None] = contextvars.ContextVar("gtp_jax_offloads", default=None)


@contextlib.contextmanager
def offloads_recorded() -> Iterator[list[Moved]]:
    """Yields a list of what layers move. Every layer that moves its activations adds an entry when it is traced in this
    context, in a forward pass that is followed by a backward pass. The layers of a loop are traced once for all of
    them, so they share an entry."""
    found: list[Moved] = []
    token = _RECORD.set(found)
    try:
        yield found
    finally:
        _RECORD.reset(token)


def record_offload(source: str, x: Any, arrays: list[jax.Array], inputs: int) -> None:
    """If `offloads_recorded` is in scope, adds an entry for one layer to its list.

    Args:
        source: the name of the module that the layer belongs to.
        x: the layer's input, a pytree of arrays.
        arrays: the arrays that the layer moves to the host's memory, those of the input first.
        inputs: the number of `arrays` that belong to the input.
    """
    found = _RECORD.get()
    if found is not None:
        moved = (_shapes(jax.tree.leaves(x)), _shapes(arrays), inputs)
        found.append(Moved(source, current_view() != "global", *moved))


def _shapes(arrays: list[jax.Array]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays)
