"""Arrays on disk, read row by row."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorstore as ts

from ._sums import naming_damage


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """A logical array of a checkpoint, of which nothing is in memory. A row is an index of its first dimension.

    Attributes:
        name: its path in the state, as the manifest has it.
        shape: logical shape.
        dtype: of its elements.
        digest: of its values, as the manifest has it.
        directory: the directory of the step's arrays.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: str
    directory: Any = dataclasses.field(repr=False)

    def read(self, begin: int, end: int) -> np.ndarray:
        """Returns rows `begin` to `end`. Reads the chunks that hold them; a stack of matrices is saved in chunks of a
        row.

        Raises:
            DamagedCheckpoint: a `ValueError`, if files are missing or not as they were written, naming them.
            ValueError: if files cannot be read.
        """
        with naming_damage(self.directory):
            return self.open()[begin:end].read().result()

    def open(self) -> Any:
        """Opens the array, as orbax lays it out."""
        where = str(self.directory)
        base = where.rstrip("/") + "/" if "://" in where else {"driver": "file", "path": where + "/"}
        store = {"driver": "ocdbt", "base": base, "path": self.name.replace("/", ".") + "/"}
        # Chunks are not kept: a reader that goes through an array needs each of them once.
        return ts.open({"driver": "zarr", "kvstore": store}, open=True, read=True).result()


def stored_arrays(directory: Any, leaves: Mapping[str, Any]) -> dict[str, StoredArray]:
    """Returns the arrays of a step's directory of arrays, by name, as the manifest describes them."""
    return {
        name: StoredArray(name, tuple(leaf["shape"]), leaf["dtype"], leaf["digest"], directory)
        for name, leaf in leaves.items()
    }
