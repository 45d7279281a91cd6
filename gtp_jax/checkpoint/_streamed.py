"""Writes arrays that are computed some rows at a time, for models that do not fit into memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ._database import OwnArrays, new_array
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


class StreamHandler(OwnArrays):
    """Writes streamed arrays one after another, each part as one chunk, in the files that orbax writes for arrays in
    memory."""

    async def serialize(self, values: Sequence[StreamedArray], infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        del args
        for value, info in zip(values, infos, strict=True):
            array = await new_array(info, value.shape, (value.rows, *value.shape[1:]), value.dtype)
            for begin, part in value.parts():
                await array[begin : begin + value.rows].write(part)
        return []
