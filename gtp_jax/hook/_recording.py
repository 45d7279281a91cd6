"""Maps the modules and arrays that a recording uses to those of the model; see [Note: recorded walks]."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ._walk import walking


class _Recording(NamedTuple):
    """The recording that is under way.

    Attributes:
        originals: the modules of the model, by the `id`s of the copies that are called.
        arrays: the arrays of the model, by the `id`s of the tracers that replace them.
        mapped: whether the call is inside a `jax.vmap`.
    """

    originals: Mapping[int, Any]
    arrays: Mapping[int, Any]
    mapped: bool


_current: contextvars.ContextVar[_Recording | None] = contextvars.ContextVar("gtp_jax_recording", default=None)


@contextlib.contextmanager
def recording(mapped: bool, originals: Mapping[int, Any], arrays: Mapping[int, Any]) -> Iterator[None]:
    """Returns a context for code that is recorded, as one walk. The arguments are the attributes of `_Recording`."""
    mark = _current.set(_Recording(originals, arrays, mapped))
    try:
        with walking():
            yield
    finally:
        _current.reset(mark)


def current_recording() -> _Recording | None:
    """Returns the recording that is under way, in this trace or in one around it; `None` if there is none."""
    return _current.get()


def original(module: Any) -> Any:
    """Returns the module of which a module is the copy that a recording calls; otherwise the module itself."""
    found = _current.get()
    return module if found is None else found.originals.get(id(module), module)


def original_array(array: Any) -> Any:
    """Returns the array of the model that a tracer of a recording replaces; otherwise the array itself."""
    found = _current.get()
    return array if found is None else found.arrays.get(id(array), array)
