"""Reads the frozen base of a run with adapters from its checkpoint, as values even if it is stored as codes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..checkpoint import Checkpoints, StoredArray
from ..formats import STORED, Format, QuantizedArray
from ..nn import layout_of
from ..ops import dequantize

FROZEN = "frozen/"


@dataclasses.dataclass(frozen=True)
class BaseArray:
    """A logical array of a base. Nothing of it is in memory until it is read.

    Attributes:
        parts: the stored arrays by name. An array that is stored as values has one part, with an empty name. A
            quantized array has `codes`, and `scales` and `amax` if its format has them.
        format: the format of the codes; `None` if values are stored.
        matrix: the logical shape of one quantized matrix, output features first.
        transposed: whether a quantized array has input features first. Its codes always have output features first.
    """

    parts: Mapping[str, StoredArray]
    format: Format | None = None
    matrix: tuple[int, int] = (0, 0)
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        if self.format is None:
            return self.parts[""].shape
        lead: tuple[int, ...] = self.parts["codes"].shape[:-2]
        return (*lead, *(reversed(self.matrix) if self.transposed else self.matrix))

    @property
    def rows(self) -> int:
        """The number of rows that are read at a time: 1 for an array of more than two dimensions, otherwise all.

        A row is one index of the first dimension.
        """
        return 1 if self._stacked else self.shape[0]

    @property
    def _stacked(self) -> bool:
        return len(self.shape) > 2

    def read(self, begin: int) -> np.ndarray:
        """Returns `rows` rows; dequantizes codes to float32.

        Args:
            begin: the index of the first row.

        Raises:
            ValueError, OSError: for the same reasons as `StoredArray.read`.
        """
        row = begin if self._stacked else None
        found = {name: _read(part, row) for name, part in self.parts.items()}
        if self.format is None:
            return found[""]
        codes, scales, amax = (
            jnp.asarray(found[name]) if name in found else None for name in ("codes", "scales", "amax")
        )
        assert codes is not None
        values = np.asarray(dequantize(QuantizedArray(codes, scales, amax, self.format, self.matrix), jnp.float32))
        return values.swapaxes(-1, -2) if self.transposed else values


def base_arrays(checkpoints: Checkpoints, manifest: Mapping[str, Any], model: nnx.Module) -> dict[str, BaseArray]:
    """Returns the arrays of a checkpoint's frozen base, by their paths joined with slashes, without reading them.

    Args:
        checkpoints: the checkpoints that contain the step.
        manifest: the manifest of the step.
        model: the model of the run, which may be abstract. Its layouts show which arrays have input features first.
    """
    stored, static = checkpoints.arrays(manifest["step"]), manifest["static"]
    transposed = {
        "/".join(map(str, path)): layout.rows > layout.cols
        for path, variable in nnx.to_flat_state(nnx.state(model))
        if (layout := layout_of(variable)) is not None
    }
    found: dict[str, dict[str, StoredArray]] = {}
    formats: dict[str, Format] = {}
    for name in stored:
        if name.startswith(FROZEN):
            above, _, last = name.removeprefix(FROZEN).rpartition("/")
            form = static.get(f"{FROZEN}{above}/format")
            if form is not None:
                formats[above] = STORED[form]
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


def _read(stored: StoredArray, row: int | None) -> np.ndarray:
    """Returns one row of a stored array, or the whole array if `row` is `None`."""
    if not stored.shape:  # an amax that belongs to all rows, and is read again with each of them
        return stored.read(0, 1)[0]
    return stored.read(0, stored.shape[0]) if row is None else stored.read(row, row + 1)
