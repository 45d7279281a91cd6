"""Writes the logical part of padded arrays, each process the shards of its own devices."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from ._database import OwnArrays, new_array


@dataclasses.dataclass(frozen=True)
class LogicalArray:
    """An array in memory that is padded at the ends of its dimensions, and saved without the padding.

    Attributes:
        array: the array in memory.
        shape: the logical shape.
    """

    array: jax.Array
    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)


class LogicalHandler(OwnArrays):
    """Writes the logical part of arrays in the files that orbax writes for other arrays. `serialize` copies the shards
    to the host; they are written in the background."""

    async def serialize(
        self, values: Sequence[LogicalArray], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        args = args or [ocp.SaveArgs()] * len(values)
        parts = [_Parts(value, info, one.shard_axes) for value, info, one in zip(values, infos, args, strict=True)]
        return [_Writing(parts)]


class _Parts:
    """This process's parts of one array, copied to the host."""

    def __init__(self, value: LogicalArray, info: Any, chunked: Sequence[int]) -> None:
        self.info, self.shape, self.dtype = info, value.shape, np.dtype(value.array.dtype)
        own = value.array.sharding.shard_shape(value.array.shape)
        sizes = zip(own, value.shape, strict=True)
        self.chunks = tuple(1 if dim in chunked else min(pair) for dim, pair in enumerate(sizes))
        shards = [shard for shard in value.array.addressable_shards if shard.replica_id == 0]
        for shard in shards:
            shard.data.copy_to_host_async()
        self.parts = [part for shard in shards if (part := _part(shard, value.shape)) is not None]


class _Writing:
    """The writing of several arrays; orbax waits for `result`."""

    def __init__(self, parts: Sequence[_Parts]) -> None:
        self._parts = parts

    def result(self, timeout: float | None = None) -> None:
        del timeout  # the writes of a file system end or raise
        asyncio.run(self._write())

    async def _write(self) -> None:
        await asyncio.gather(*map(_write, self._parts))


async def _write(own: _Parts) -> None:
    # in a database of its own, because orbax writes to that of the process meanwhile
    array = await new_array(own.info, own.shape, own.chunks, own.dtype, database="padded")
    for index, part in own.parts:
        await array[index].write(part)


def _part(shard: Any, shape: tuple[int, ...]) -> tuple[tuple[slice, ...], np.ndarray] | None:
    """Returns the logical part of a shard, with its place in the array; `None` if all of it is padding."""
    starts = [one.start or 0 for one in shard.index]
    sizes = [
        max(0, min(size, limit - start)) for size, limit, start in zip(shard.data.shape, shape, starts, strict=True)
    ]
    if not math.prod(sizes):
        return None
    index = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
    return index, np.array(np.asarray(shard.data)[tuple(map(slice, sizes))])
