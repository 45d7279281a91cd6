"""Writes arrays that are computed some rows at a time, for models that do not fit into memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from ._digest import Digest


@dataclasses.dataclass(frozen=True)
class StreamedArray:
    """A logical array that is computed some rows at a time. A row is one index of its first dimension.

    Attributes:
        shape: the logical shape.
        dtype: the dtype of the elements.
        rows: how many rows are computed and written at a time; must divide the number of rows.
        make: `make(begin)` returns the `rows` rows from `begin` on; called twice for each part.
    """

    shape: tuple[int, ...]
    dtype: jax.typing.DTypeLike
    rows: int
    make: Callable[[int], np.ndarray]

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(self.dtype))

    def parts(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yields each part of the array: the index of its first row, and its values."""
        expected = (self.rows, *self.shape[1:])
        for begin in range(0, self.shape[0], self.rows):
            part = self.make(begin)
            assert (part.shape, part.dtype) == (expected, self.dtype), (part.shape, part.dtype, self)
            yield begin, part

    def digest(self) -> str:
        """Returns the digest of the whole array; computes each part once."""
        digest = Digest()
        for begin, part in self.parts():
            digest.add(begin, part)
        return digest.text()


class StreamHandler(ocp.type_handlers.TypeHandler):
    """Writes streamed arrays one after another, each part as one chunk, in the files that orbax writes for arrays in
    memory."""

    def typestr(self) -> str:
        return "jax.Array"

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        raise NotImplementedError("arrays are described by the manifest")

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        del args
        for value, info in zip(values, infos, strict=True):
            await info.await_path_creation()
            own = f"{info.parent_dir}/ocdbt.process_{jax.process_index()}/"
            store = {"driver": "ocdbt", "base": {"driver": "file", "path": own}, "path": info.name + "/"}
            layout = {
                "shape": value.shape,
                "chunks": (value.rows, *value.shape[1:]),
                "compressor": {"id": "zstd", "level": 1},
            }
            array = await ts.open(
                {"driver": "zarr", "kvstore": store, "metadata": layout, "store_data_equal_to_fill_value": True},
                dtype=value.dtype,
                create=True,
                context=info.ts_context,
            )
            for begin, part in value.parts():
                await array[begin : begin + value.rows].write(part)
        return []

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        raise NotImplementedError("arrays are restored as `jax.Array`, by orbax's own handler")
