"""Copies parts of arrays between a device and its host, while the program goes on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax import lax

from .. import native
from ..mesh import platform


class Part(NamedTuple):
    """Rows of an array, where the matrices of the array are joined along their rows.

    Attributes:
        first: the number of the first row.
        rows: the number of rows.
        shape: the shape in which the part is computed: the rows, the columns, and 1 for the other dimensions.
    """

    first: int
    rows: int
    shape: tuple[int, ...]

    def of(self, array: jax.Array) -> jax.Array:
        """Returns this part of an array."""
        per_index = math.prod(array.shape[1:-1])
        if array.ndim > 2 and self.first % per_index == self.rows % per_index == 0:  # XLA sees through this one
            first = self.first // per_index
            return lax.slice_in_dim(array, first, first + self.rows // per_index).reshape(self.shape)
        joined = array.reshape(-1, array.shape[-1])
        return lax.slice_in_dim(joined, self.first, self.first + self.rows).reshape(self.shape)

    def put(self, array: jax.Array, new: jax.Array) -> jax.Array:
        """Returns an array in which this part is replaced."""
        joined, new = array.reshape(-1, array.shape[-1]), new.reshape(self.rows, -1)
        if self.rows == joined.shape[0]:
            return new.reshape(array.shape)
        return lax.dynamic_update_slice_in_dim(joined, new, self.first, 0).reshape(array.shape)


class Leaving(NamedTuple):
    """A part that has begun to leave the device.

    Attributes:
        new: the part.
        first: the number of its first element in the array on the host.
    """

    new: jax.Array
    first: int


class HostCopies:
    """Copies parts of arrays on the host to the device and back. What is given as `after` comes before a copy.

    On GPUs, the library's handlers start each copy where the program says so, on streams of their own. Elsewhere, XLA
    copies, in an order of its own. (On GPUs it removes barriers between such copies, and the whole state would arrive
    at once.)
    """

    def __init__(self) -> None:
        self._started = platform() == "gpu" and native.has("gtp_read", "CUDA")

    def read(self, array: jax.Array, part: Part, after: Sequence[jax.Array]) -> jax.Array:
        """Starts to copy a part to the device. Only `arrive` may read the result."""
        if self._started:
            return native.read(array, part.shape, part.first * array.shape[-1], after)
        return jax.device_put(part.of(array), jax.memory.Space.Device)

    def arrive(self, read: jax.Array, after: Sequence[jax.Array]) -> jax.Array:
        """Waits for what `read` started, and returns it."""
        return native.arrive(read, after) if self._started else read

    def write(
        self, array: jax.Array, part: Part, new: jax.Array, after: Sequence[jax.Array]
    ) -> tuple[jax.Array, Leaving]:
        """Starts to replace a part of an array on the host, in place. Until `leave` has returned the array, nothing may
        read this part. A copy of the old part to the device must have arrived before."""
        leaving = Leaving(new, part.first * array.shape[-1])
        if self._started:
            return native.write(array, *leaving, after), leaving
        return part.put(array, jax.device_put(new, jax.memory.Space.Host)), leaving

    def leave(self, array: jax.Array, leaving: Leaving, after: Sequence[jax.Array]) -> jax.Array:
        """Waits for what `write` started. Takes both of its results, and returns the array."""
        return native.leave(array, *leaving, after) if self._started else array
