"""Reads and writes the safetensors format: 8 bytes with the header's length, a JSON header, and the tensors' bytes.

Implemented here because the `safetensors` package supports the dtypes of MXFP8 and NVFP4 in the header but not in
numpy, and because we write a model tensor by tensor.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ml_dtypes
import numpy as np

from .._foreign import brief, open_regular, parse_json

# By name in the header: numpy's dtype and the bits per element. Numpy holds elements narrower than a byte packed.
DTYPES: dict[str, tuple[np.dtype[Any], int]] = {
    "BOOL": (np.dtype(np.bool_), 8),
    "F4": (np.dtype(np.uint8), 4),
    "U8": (np.dtype(np.uint8), 8),
    "I8": (np.dtype(np.int8), 8),
    "F8_E4M3": (np.dtype(ml_dtypes.float8_e4m3fn), 8),
    "F8_E5M2": (np.dtype(ml_dtypes.float8_e5m2), 8),
    "F8_E8M0": (np.dtype(ml_dtypes.float8_e8m0fnu), 8),
    "U16": (np.dtype(np.uint16), 16),
    "I16": (np.dtype(np.int16), 16),
    "F16": (np.dtype(np.float16), 16),
    "BF16": (np.dtype(ml_dtypes.bfloat16), 16),
    "U32": (np.dtype(np.uint32), 32),
    "I32": (np.dtype(np.int32), 32),
    "F32": (np.dtype(np.float32), 32),
    "U64": (np.dtype(np.uint64), 64),
    "I64": (np.dtype(np.int64), 64),
    "F64": (np.dtype(np.float64), 64),
}

_METADATA = "__metadata__"
_LENGTH_BYTES = 8
# The limit of the reference implementation.
_MAX_HEADER_BYTES = 100_000_000
_MAX_DIMS = 32
_MAX_NAME = 1_000


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor of a file.

    Attributes:
        name: the name of the tensor.
        dtype: the dtype, a key of `DTYPES`.
        shape: the shape in elements.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size in the file, in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype][1] // 8

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """The shape of numpy's array: for elements narrower than a byte, the last dimension counts bytes."""
        bits = DTYPES[self.dtype][1]
        return self.shape if bits >= 8 else (*self.shape[:-1], self.shape[-1] * bits // 8)


class Writer:
    """Writes a file tensor by tensor, from the names, dtypes and shapes of all tensors.

    Args:
        path: the path of the file, which must not exist.
        entries: the tensors of the file, in the order in which their values are written.
        metadata: strings by name, for the header.
    """

    def __init__(self, path: Path, entries: Sequence[Entry], metadata: dict[str, str]) -> None:
        header: dict[str, Any] = {_METADATA: metadata}
        end = 0
        for entry in entries:
            begin, end = end, end + entry.nbytes
            header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _LENGTH_BYTES)  # so that tensors are aligned
        self._left = list(reversed(entries))
        self._file = path.open("xb")
        self._file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)

    def write(self, values: np.ndarray) -> None:
        """Writes the next tensor."""
        entry = self._left.pop()
        assert (values.shape, values.dtype) == (entry.packed_shape, DTYPES[entry.dtype][0]), (entry, values.dtype)
        self._file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, trace
        with self._file:
            if error is None:
                assert not self._left, self._left
                self._file.flush()
                os.fsync(self._file.fileno())


class Reader:
    """Reads a file. The header is read and checked at once, and tensors are read one at a time.

    Args:
        path: the path of the file in messages.
        place: the path of the file with links followed; by default `path`.

    Attributes:
        path: the path of the file in messages.
        entries: the tensors of the file by name.
        metadata: the strings in the header.

    Raises:
        ValueError: if the file is incomplete, not safetensors or not a regular file. The message says what was found
            and what is expected.
        OSError: if the file cannot be opened.
    """

    def __init__(self, path: Path, *, place: Path | None = None) -> None:
        self.path = path
        self._place = path if place is None else place
        with open_regular(self._place) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
                raise self._broken(
                    f"its first 8 bytes announce a header of {length} bytes, but the file has {size} (and a header may "
                    f"have at most {_MAX_HEADER_BYTES})"
                )
            text = file.read(length)
        self._begin = _LENGTH_BYTES + length
        try:
            header = parse_json(text)
        except ValueError as error:
            raise self._broken(f"its header is not JSON: {error}") from error
        if not isinstance(header, dict):
            raise self._broken(f"its header is a {type(header).__name__}, not an object of tensors")
        self.metadata: dict[str, str] = header.pop(_METADATA, {})
        if not isinstance(self.metadata, dict):
            raise self._broken(f"its metadata are {brief(self.metadata)}, not an object of strings")
        for key, value in self.metadata.items():
            if not isinstance(value, str):
                raise self._broken(f"its metadata have {brief(value)} as {brief(key)}, where a string is expected")
        parsed = {name: self._entry(name, fields) for name, fields in header.items()}
        self.entries: dict[str, Entry] = {name: entry for name, (entry, _) in parsed.items()}
        self._offsets = {name: begin for name, (_, begin) in parsed.items()}
        end, last = 0, "the header"
        for name in sorted(parsed, key=lambda name: (self._offsets[name], self.entries[name].nbytes)):
            begin = self._offsets[name]
            if begin != end:
                what = "overlaps" if begin < end else "leaves a hole behind"
                raise self._broken(f"{name} begins at byte {begin} and so {what} {last}, which ends at byte {end}")
            end, last = begin + self.entries[name].nbytes, name
        if self._begin + end != size:
            what = "truncated" if self._begin + end > size else "longer than its tensors"
            raise self._broken(f"it is {what}: {size} bytes, {self._begin + end} are expected")

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor's values; packed bytes if elements are narrower than a byte."""
        entry = self.entries[name]
        with open_regular(self._place) as file:
            file.seek(self._begin + self._offsets[name])
            flat = np.fromfile(file, np.uint8, entry.nbytes)
        if flat.nbytes != entry.nbytes:
            raise self._broken(f"{name} ends after {flat.nbytes} of {entry.nbytes} bytes")
        return flat.view(DTYPES[entry.dtype][0]).reshape(entry.packed_shape)

    def _entry(self, name: str, fields: Any) -> tuple[Entry, int]:
        if len(name) > _MAX_NAME or not name.isprintable():
            raise self._broken(
                f"a tensor has the name {brief(name)}; at most {_MAX_NAME} printable characters are allowed"
            )
        try:
            dtype, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
        except (TypeError, KeyError, ValueError) as error:
            raise self._broken(
                f"{name} is described by {brief(fields)}; dtype, shape and data_offsets are expected"
            ) from error
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise self._broken(f"{name} has the unknown dtype {brief(dtype)}; the known dtypes are {', '.join(DTYPES)}")
        if not all(type(number) is int and 0 <= number < 1 << 63 for number in (*shape, begin, end)):
            raise self._broken(
                f"{name} has shape {brief(list(shape))} and offsets {brief([begin, end])}; whole numbers of 63 bits "
                "are expected"
            )
        if len(shape) > _MAX_DIMS:
            raise self._broken(f"{name} has {len(shape)} dimensions; at most {_MAX_DIMS} are allowed")
        entry = Entry(name, dtype, shape)
        if math.prod(shape) * DTYPES[dtype][1] % 8 or (shape and shape[-1] * DTYPES[dtype][1] % 8):
            raise self._broken(f"{name}, {dtype}{list(shape)}, does not fill whole bytes")
        if end - begin != entry.nbytes:
            raise self._broken(f"{name}, {dtype}{list(shape)}, has {end - begin} bytes, {entry.nbytes} are expected")
        return entry, begin

    def _broken(self, what: str) -> ValueError:
        return ValueError(
            f"{self.path} is not a safetensors file that can be read: {what}. If it may be damaged, download or write "
            "it again."
        )


def shard(entries: Sequence[Entry], limit: int) -> Iterator[list[Entry]]:
    """Splits tensors, in order, into files with at most `limit` bytes of tensors, or with one larger tensor."""
    part: list[Entry] = []
    for entry in entries:
        if part and sum(e.nbytes for e in part) + entry.nbytes > limit:
            yield part
            part = []
        part.append(entry)
    yield part
