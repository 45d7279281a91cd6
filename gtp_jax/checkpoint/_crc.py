"""Combines the CRC-32s of a file's parts, so that several threads can share a file."""

from __future__ import annotations

import functools
import zlib

_BITS = 32
# A linear map on 32 bits, represented by the image of each bit.
_Columns = tuple[int, ...]


def joined(left: int, right: int, right_bytes: int) -> int:
    """Returns the CRC-32 of two concatenated parts.

    A CRC without its inversions is linear over GF(2). Appending `right_bytes` bytes therefore applies a linear map to
    `left`; the result is XORed with `right` (M. Adler's `crc32_combine` in zlib).

    Args:
        left: the CRC-32 of the first part; 0 if it is empty.
        right: the CRC-32 of the second part.
        right_bytes: the length of the second part, in bytes.
    """
    return _apply(_zeros(right_bytes), left) ^ right


@functools.cache
def _zeros(count: int) -> _Columns:
    """Returns the linear map that appending `count` zero bytes applies to a CRC without inversions."""
    if count == 0:
        return tuple(1 << bit for bit in range(_BITS))
    if count == 1:
        return tuple(zlib.crc32(b"\0", 1 << bit) ^ zlib.crc32(b"\0") for bit in range(_BITS))
    half = _zeros(count // 2)
    both = tuple(_apply(half, column) for column in half)
    return tuple(_apply(_zeros(1), column) for column in both) if count % 2 else both


def _apply(columns: _Columns, bits: int) -> int:
    image = 0
    for column in columns:
        image ^= column if bits & 1 else 0
        bits >>= 1
    return image
