"""The frozen base of a run with adapters, read from its checkpoint: values, also where codes are stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from ..checkpoint import Digest, StoredArray
from ..formats import FORMATS, Format, QuantizedArray
from ..ops import dequantize

FROZEN = "frozen/"


@dataclasses.dataclass(frozen=True)
class BaseArray:
    """A logical array of a base, of which nothing is in memory.

    Attributes:
        parts: the arrays that are stored: one, whose name is empty, or those of codes, by their names.
        format: of the codes; `None` of an array.
        matrix: the shape of one matrix of codes, output features first.
        transposed: whether the array has input features first, where codes have output features.
    """

    parts: Mapping[str, StoredArray]
    format: Format | None = None
    matrix: tuple[int, int] = (0, 0)
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Its logical shape."""
        if self.format is None:
            return self.parts[""].shape
        lead: tuple[int, ...] = self.parts["codes"].shape[:-2]
        return (*lead, *(reversed(self.matrix) if self.transposed else self.matrix))

    @property
    def rows(self) -> int:
        """How many indices of the first dimension are read at a time: a layer, or all of what is not stacked."""
        first, *others = self.shape
        return 1 if len(others) > 1 else first

    def read(self, begin: int, digests: dict[str, Digest]) -> np.ndarray:
        """Returns `rows` indices of the first dimension; of codes what they stand for, in float32.

        Args:
            begin: the first of them.
            digests: by name of the stored array, to which what is read is added.
        """
        found = {name: _read(part, begin, self.rows, digests) for name, part in self.parts.items()}
        if self.format is None:
            return found[""]
        codes, scales, amax = (
            jnp.asarray(found[name]) if name in found else None for name in ("codes", "scales", "amax")
        )
        assert codes is not None
        values = np.asarray(dequantize(QuantizedArray(codes, scales, amax, self.format, self.matrix), jnp.float32))
        return values.swapaxes(-1, -2) if self.transposed else values

    def damaged(self, digests: Mapping[str, Digest]) -> list[str]:
        """Returns the names of stored arrays that were read otherwise than they were saved."""
        return [part.name for part in self.parts.values() if part.shape and digests[part.name].text() != part.digest]


def base_arrays(
    stored: Mapping[str, StoredArray], static: Mapping[str, str], transposed: Mapping[str, bool]
) -> dict[str, BaseArray]:
    """Returns the arrays of a checkpoint's base, by path joined by slashes.

    Args:
        stored: all of its arrays by name.
        static: static fields of its state, as the manifest has them.
        transposed: by path, whether a kernel has input features first.
    """
    found: dict[str, dict[str, StoredArray]] = {}
    formats: dict[str, Format] = {}
    for name in stored:
        if name.startswith(FROZEN):
            above, _, last = name.removeprefix(FROZEN).rpartition("/")
            form = static.get(f"{FROZEN}{above}/format")
            if form is not None:
                formats[above] = FORMATS[form]
                found.setdefault(above, {})[last] = stored[name]
            else:
                found[name.removeprefix(FROZEN)] = {"": stored[name]}
    arrays = {}
    for path, parts in found.items():
        if path not in formats:
            arrays[path] = BaseArray(parts)
            continue
        rows, cols = (int(size) for size in static[f"{FROZEN}{path}/matrix"].strip("()").split(","))
        arrays[path] = BaseArray(parts, formats[path], (rows, cols), transposed.get(path, False))
    return arrays


def _read(stored: StoredArray, begin: int, rows: int, digests: dict[str, Digest]) -> np.ndarray:
    if not stored.shape:  # the amax of one matrix, too little for a digest
        return np.asarray(stored.open().read().result())
    if rows > 1:
        begin, rows = 0, stored.shape[0]
    part = stored.read(begin, begin + rows)
    digests.setdefault(stored.name, Digest()).add(begin, part)
    return part
