"""Explains Flax's error for an `nnx.Embed` that is given an array whose elements are not integers."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from flax import nnx

from ..ops import not_ids
from ._path import path_of


def ids_refused_by(error: BaseException, kinds: tuple[type, ...]) -> tuple[nnx.Module, Any] | None:
    """Returns the embedding that is called with an array of other than integers, and the array, if an error was raised
    because of that; otherwise `None`.

    Args:
        error: the error, whose traceback has the call.
        kinds: the classes of embeddings. Each takes the ids as the first argument of `__call__`.
    """
    for call in _calls(error):
        module = call.f_locals.get("self")
        if call.f_code.co_name == "__call__" and isinstance(module, kinds):
            dtype = getattr(ids := call.f_locals.get(call.f_code.co_varnames[1]), "dtype", None)
            if dtype is not None and not jnp.issubdtype(dtype, jnp.integer):
                return module, ids
    return None


def float_ids_explained(error: BaseException) -> str:
    """Returns a message that names the `nnx.Embed` and what it is given, if this is why the error was raised; otherwise
    an empty string."""
    if (found := ids_refused_by(error, (nnx.Embed,))) is None:
        return ""
    embed, ids = found
    weight = embed.embedding  # pyright: ignore[reportAttributeAccessIssue]
    known = "weight_paths" in weight.get_metadata()
    return not_ids(f"the `nnx.Embed` of {'.'.join(path_of(weight))}" if known else "`nnx.Embed`", ids)


def _calls(error: BaseException | None) -> Iterator[Any]:
    """Yields the frames of the traceback of an error, and of the errors that caused it."""
    while error is not None:
        yield from (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        error = error.__cause__
