"""Arrays on disk, read row by row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorstore as ts


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """A logical array of a checkpoint, of which nothing is in memory. A row is an index of its first dimension.

    Attributes:
        name: its path in the state, as the manifest has it.
        shape: logical shape.
        dtype: of its elements.
        digest: of its values, as the manifest has it.
        open: opens it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: str
    open: Callable[[], Any] = dataclasses.field(repr=False)

    def read(self, begin: int, end: int) -> np.ndarray:
        """Rows `begin` to `end`. Reads the chunks that hold them; a stack of matrices is saved in chunks of a row.

        Raises:
            ValueError: if the files are damaged, or in part missing.
        """
        return self.open()[begin:end].read().result()


def open_array(directory: Any, path: tuple[str, ...]) -> Any:
    """Opens an array of a step's directory of arrays, as orbax lays it out."""
    where = str(directory)
    base = where.rstrip("/") + "/" if "://" in where else {"driver": "file", "path": where + "/"}
    store = {"driver": "ocdbt", "base": base, "path": ".".join(path) + "/"}
    # Chunks are not kept: a reader that goes through an array needs each of them once.
    return ts.open({"driver": "zarr", "kvstore": store}, open=True, read=True).result()
