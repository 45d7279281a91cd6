"""Computes our arrays from the tensors of a Hugging Face model, one part at a time."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..checkpoint import StreamedArray
from ..formats import QuantizedArray, scales_shape
from ..models import Tensor, array_shapes
from ._safetensors import Reader
from ._stored import StoredAs, Wanted

# Returns a tensor, or one of its parts, in the form in which an array holds it.
Read = Callable[[Tensor], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Arrays:
    """The arrays of a model. Nothing of them is in memory until it is read.

    Attributes:
        tensors: the tensors of the model, layer after layer.
        parts: the tensors of files in which each tensor is stored, by its name.
        readers: the file of each tensor.
        stored_as: the layout of quantized weights; `None` if nothing is quantized.
        note: called with the number of bytes of each tensor whose values are read.
    """

    tensors: Sequence[Tensor]
    parts: Mapping[str, Sequence[Wanted]]
    readers: Mapping[str, Reader]
    stored_as: StoredAs | None
    note: Callable[[int], Any]

    @functools.cached_property
    def _latest(self) -> list[Any]:
        """The latest tensor of a file that contains several, and its name: they are read one after the other."""
        return ["", None]

    @functools.cached_property
    def rows(self) -> dict[str, list[list[Tensor]]]:
        """The tensors of each array, as a list per layer: one tensor per expert, or a single one."""
        found: dict[str, list[list[Tensor]]] = {}
        for tensor in self.tensors:
            layers = found.setdefault(tensor.path, [])
            if layers and tensor.expert:
                layers[-1].append(tensor)
            else:
                layers.append([tensor])
        return found

    def values(self) -> dict[str, StreamedArray]:
        """Returns the values of all arrays, float32."""
        shapes = array_shapes(self.tensors)
        return {path: self._streamed(path, shape, np.float32, self._values) for path, shape in shapes.items()}

    def codes(self) -> dict[str, QuantizedArray]:
        """Returns the codes and scales of the kernels that are stored in a format of ours in every layer, by
        themselves, with a `StreamedArray` instead of each array."""
        found: dict[str, QuantizedArray] = {}
        form = None if self.stored_as is None else self.stored_as.format
        for path, shape in array_shapes(self.tensors).items():
            rows = self.rows[path]
            quantized = all(
                len(self.parts[tensor.name]) > 1 and tensor.within is None for layer in rows for tensor in layer
            )
            if form is None or not quantized or "kernel" not in path.split("/"):
                continue
            matrix = rows[0][0].shape[0], rows[0][0].shape[1]
            grid = scales_shape(form, matrix, False)
            assert grid is not None
            codes: Any = self._streamed(path, (*shape[:-2], *matrix), np.uint8, self._codes)
            scales: Any = self._streamed(path, (*shape[:-2], *grid), np.float32, self._scales)
            found[path] = QuantizedArray(codes, scales, None, form, matrix)
        return found

    def _streamed(self, path: str, shape: tuple[int, ...], dtype: Any, read: Read) -> StreamedArray:
        whole = self.rows[path][0][0].layer is None
        make = functools.partial(self._make, read, self.rows[path])
        return StreamedArray(shape, dtype, shape[0] if whole else 1, make)

    @staticmethod
    def _make(read: Read, rows: list[list[Tensor]], begin: int) -> np.ndarray:
        row = rows[begin]
        if row[0].expert is not None:
            return np.stack([read(tensor) for tensor in row])[None]
        return read(row[0]) if row[0].layer is None else read(row[0])[None]

    def _read(self, tensor: Tensor) -> list[np.ndarray]:
        return [self.readers[part.name].read(part.name) for part in self.parts[tensor.name]]

    def _values(self, tensor: Tensor) -> np.ndarray:
        if tensor.within is None:
            values = self._whole(tensor)
        else:
            if self._latest[0] != tensor.name:
                self._latest[:] = tensor.name, self._whole(tensor)
            values = tensor.view(self._latest[1])
        stored = sum(self.readers[part.name].entries[part.name].nbytes for part in self.parts[tensor.name])
        self.note(stored * math.prod(tensor.shape) // math.prod(tensor.stored_shape))
        return np.ascontiguousarray(values.T if tensor.transposed else values, np.float32)

    def _whole(self, tensor: Tensor) -> np.ndarray:
        """Returns the values of the tensor in a file that contains `tensor`."""
        read = self._read(tensor)
        form = self.stored_as if len(read) > 1 else None
        values = read[0] if form is None else form.values(read)
        if not np.isfinite(values).all():
            number = 0 if form is None else form.not_finite(read)
            product = ", multiplied by its scales," if number is None else ""
            raise ValueError(
                f"{self._where(tensor, number or 0)}{product} holds NaN or Inf, so every result would be NaN. Download "
                "it again, or use another checkpoint of the model."
            )
        return values

    def _codes(self, tensor: Tensor) -> np.ndarray:
        assert self.stored_as is not None
        return self.stored_as.unchanged(self._read(tensor))[0]

    def _scales(self, tensor: Tensor) -> np.ndarray:
        assert self.stored_as is not None
        _, scales = self.stored_as.unchanged(self._read(tensor))
        if np.any(scales < 0):
            raise ValueError(
                f"{self._where(tensor, 1)} holds a negative scale; scales are at least 0. Download it again, or use "
                "another checkpoint of the model."
            )
        return scales

    def _where(self, tensor: Tensor, number: int) -> str:
        name = self.parts[tensor.name][number].name
        return f"{name} in {self.readers[name].path}"
