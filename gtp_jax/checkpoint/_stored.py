"""Reads arrays on disk row by row, and checks what was read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from ._checksums import DamagedCheckpoint, differences
from ._database import stored_array
from ._digest import Digest
from ._sums import naming_damage


@dataclasses.dataclass(eq=False)
class StoredArray:
    """A logical array of a checkpoint that is not in memory. A row is one index of its first dimension; a scalar is one
    row.

    Attributes:
        name: the path of the array in the state, as in the manifest.
        shape: the logical shape.
        dtype: the dtype of the elements.
        digest: the digest of the values, as in the manifest.
        directory: the directory of the step's arrays.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: str
    directory: Any = dataclasses.field(repr=False)
    _read: Digest = dataclasses.field(default_factory=Digest, init=False, repr=False)

    def read(self, begin: int, end: int) -> np.ndarray:
        """Returns the rows from `begin` up to, but not including, `end`. When all have been read, `check_values` says
        whether they are those that were saved.

        Reads the chunks that hold them; `Checkpoints.save` writes a stack of matrices in chunks of one row. Rows may be
        read again, from the same `begin` on.

        Raises:
            DamagedCheckpoint: a `ValueError`, if files are missing or have changed since they were written; names them.
            ValueError, OSError: if files cannot be read.
        """
        with naming_damage(self.directory):
            rows = self._rows(begin, end)
        self._read.add(begin, rows)
        return rows

    def open(self) -> Any:
        """Opens the array in orbax's layout."""
        return stored_array(self.directory, self.name)

    def _rows(self, begin: int, end: int) -> np.ndarray:
        array = self.open()
        return array[begin:end].read().result() if self.shape else array.read().result().reshape(1)[begin:end]


def check_values(arrays: Iterable[StoredArray]) -> None:
    """Checks arrays of one step, of which all rows have been read.

    Raises:
        DamagedCheckpoint: a `ValueError`, if values differ from those saved; names the arrays.
    """
    read = {array.name: array for array in arrays}
    found = {name: array._read.text() for name, array in read.items()}
    if lines := differences({name: array.digest for name, array in read.items()}, found):
        raise DamagedCheckpoint(next(iter(read.values())).directory.parent, lines)
