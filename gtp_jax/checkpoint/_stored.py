"""Arrays on disk, read row by row."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
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
        """Returns rows `begin` to `end`. Reads the chunks that hold them; a stack of matrices is saved in chunks of a
        row.

        Raises:
            ValueError: if the files are damaged, or in part missing.
        """
        return self.open()[begin:end].read().result()


def stored_arrays(directory: Any, leaves: Mapping[str, Any]) -> dict[str, StoredArray]:
    """Returns the arrays of a step's directory of arrays, by name, as the manifest describes them."""
    arrays = {}
    for name, leaf in leaves.items():
        opened = functools.partial(_open_array, directory, tuple(name.split("/")))
        arrays[name] = StoredArray(name, tuple(leaf["shape"]), leaf["dtype"], leaf["digest"], opened)
    return arrays


def _open_array(directory: Any, path: tuple[str, ...]) -> Any:
    """Opens an array of a step's directory of arrays, as orbax lays it out."""
    where = str(directory)
    base = where.rstrip("/") + "/" if "://" in where else {"driver": "file", "path": where + "/"}
    store = {"driver": "ocdbt", "base": base, "path": ".".join(path) + "/"}
    # Chunks are not kept: a reader that goes through an array needs each of them once.
    return ts.open({"driver": "zarr", "kvstore": store}, open=True, read=True).result()
