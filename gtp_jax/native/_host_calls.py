"""Calls the handlers that copy between a device and its host while the program goes on. GPUs only.

A copy is two calls: one starts it, and one waits for it. The `after` of a call are arrays that XLA computes, or copies
that it starts, before the call; their values are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

from ._calls import LAUNCH_NS


def read(array: jax.Array, shape: Sequence[int], first: int, after: Sequence[jax.Array]) -> jax.Array:
    """Starts to copy a part of an array on the host to the device. Only `arrive` may read the result.

    Args:
        array: the array.
        shape: the shape of the part, whose elements are contiguous in the array.
        first: the number of the first element.
        after: what comes before.
    """
    result = jax.ShapeDtypeStruct(tuple(shape), array.dtype)
    return _call("gtp_read", result, array, *after, offset=_bytes(array, first))


def arrive(part: jax.Array, after: Sequence[jax.Array]) -> jax.Array:
    """Waits for what `read` started, and returns it. XLA keeps the call even if nothing reads the result, because it
    may give the buffer to others then."""
    return _call("gtp_arrive", part, part, *after, effect=True)


def write(array: jax.Array, part: jax.Array, first: int, after: Sequence[jax.Array]) -> jax.Array:
    """Starts to replace a part of an array on the host, in place, and returns the array. The arguments are those of
    `read`, and the new part. Call `leave` next."""
    return _call("gtp_write", array, array, part, *after, offset=_bytes(array, first))


def leave(array: jax.Array, part: jax.Array, first: int, after: Sequence[jax.Array]) -> jax.Array:
    """Waits for what `write` started, and returns the array.

    Args:
        array: what `write` returned.
        part: the argument of `write`, which is kept until then.
        first: as for `write`.
        after: what comes before.
    """
    return _call("gtp_leave", array, array, part, *after, offset=_bytes(array, first))


def _bytes(array: jax.Array, first: int) -> np.int64:
    return np.int64(first * array.dtype.itemsize)


def _call(target: str, result: Any, *operands: jax.Array, effect: bool = False, **attributes: Any) -> jax.Array:
    """Calls a handler. A `result` that is the first operand is replaced in place; otherwise it is a shape."""
    with set_xla_metadata(latency_metadata=str(LAUNCH_NS)):
        aliases = {0: 0} if result is operands[0] else {}
        form = jax.typeof(result) if aliases else result
        call = jax.ffi.ffi_call(target, form, has_side_effect=effect, input_output_aliases=aliases)
        return call(*operands, **attributes)
