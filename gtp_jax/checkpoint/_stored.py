"""Reads arrays on disk row by row."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorstore as ts

from ._sums import naming_damage


@dataclasses.dataclass(frozen=True)
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

    def read(self, begin: int, end: int) -> np.ndarray:
        """Returns the rows from `begin` up to, but not including, `end`.

        Reads the chunks that hold them; `Checkpoints.save` writes a stack of matrices in chunks of one row.

        Raises:
            DamagedCheckpoint: a `ValueError`, if files are missing or have changed since they were written; names them.
            ValueError, OSError: if files cannot be read.
        """
        with naming_damage(self.directory):
            array = self.open()
            return array[begin:end].read().result() if self.shape else array.read().result().reshape(1)[begin:end]

    def open(self) -> Any:
        """Opens the array in orbax's layout."""
        where = str(self.directory)
        base = where.rstrip("/") + "/" if "://" in where else {"driver": "file", "path": where + "/"}
        store = {"driver": "ocdbt", "base": base, "path": self.name.replace("/", ".") + "/"}
        # Chunks are not cached, because a reader that goes through an array needs each chunk once.
        return ts.open({"driver": "zarr", "kvstore": store}, open=True, read=True).result()


def stored_arrays(directory: Any, leaves: Mapping[str, Any]) -> dict[str, StoredArray]:
    """Returns a step's arrays by name, as the manifest describes them, given the directory of its arrays."""
    return {
        name: StoredArray(name, tuple(leaf["shape"]), leaf["dtype"], leaf["digest"], directory)
        for name, leaf in leaves.items()
    }
