"""Computes the sizes and CRC-32s of files while the files are still being written."""

from __future__ import annotations

import contextlib
import functools
import os
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any, Self

from etils import epath

# That of CRC-32, the powers of x from the highest bit down.
_POLYNOMIAL = 0xEDB88320
_PART_BYTES = 1 << 24
# Small enough for a core's own cache, and large enough that threads seldom contend for the GIL.
_BUFFER_BYTES = 1 << 20
# On 64 cores, 16 threads sum 28 GB/s from memory and 32 threads 34 GB/s; the writes need cores too.
_THREADS = max(4, min(32, (os.cpu_count() or 1) // 2))


class FileSums:
    """Sums files in parts with several threads, because the data are in few large files.

    A file that is only appended to can be summed as it grows: `follow` starts summing its complete parts without
    waiting for them, so `finish` has little left to do when the last byte is written. A followed file stays open: it
    may then be renamed, and no other file can take its inode.

    Args:
        directory: the directory that the files' names are relative to.
    """

    def __init__(self, directory: epath.Path) -> None:
        self._directory = directory
        self._is_local = "://" not in str(directory)
        self._pool = ThreadPoolExecutor(_THREADS)
        self._followed: dict[int, tuple[IO[bytes], list[Future[int]]]] = {}

    def follow(self, names: Iterable[str]) -> None:
        """Starts summing those parts of these files that are complete. Does nothing if the directory is a URL."""
        for name in names if self._is_local else ():
            with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
                status = os.stat(self._directory / name)
                if status.st_size >= _PART_BYTES:
                    self._follow(name, status.st_ino, status.st_size // _PART_BYTES)

    def finish(self, names: Iterable[str]) -> dict[str, list[int]]:
        """Returns the size and CRC-32 of each of these files, as they are now."""
        begun = {name: self._begin(self._directory / name) for name in names}
        by_name = {}
        for name, (size, parts) in begun.items():
            crc = 0
            for index, part in enumerate(parts):
                crc = _joined(crc, part.result(), min(_PART_BYTES, size - index * _PART_BYTES))
            by_name[name] = [size, crc]
        return by_name

    def _follow(self, name: str, inode: int, count: int) -> None:
        """Starts summing those of the first `count` parts of a file that are not yet started."""
        if inode not in self._followed:
            file = (self._directory / name).open("rb")
            if os.fstat(file.fileno()).st_ino != inode:
                return file.close()  # another file has taken its name; the next `follow` will see it
            self._followed[inode] = file, []
        file, parts = self._followed[inode]
        for index in range(len(parts), count):
            parts.append(self._pool.submit(_sum_part, file.fileno(), index * _PART_BYTES))

    def _begin(self, path: epath.Path) -> tuple[int, list[Future[int]]]:
        """Returns the size of a complete file, and the pending sums of all its parts, followed or not."""
        size = path.stat().length
        _, followed = self._followed.get(os.stat(path).st_ino, (None, [])) if self._is_local else (None, [])
        left = range(len(followed) * _PART_BYTES, size, _PART_BYTES)
        return size, [*followed, *(self._pool.submit(_sum_part, path, begin) for begin in left)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        for file, _parts in self._followed.values():
            file.close()


def _joined(left: int, right: int, right_bytes: int) -> int:
    """Returns the CRC-32 of two concatenated parts, given those of the parts and the length of the second in bytes.

    A CRC without its inversions is a remainder over GF(2). Appending n bytes multiplies that of the first part by
    x^(8n); that of the second is added (M. Adler's `crc32_combine` in zlib).
    """
    return _product(left, _power(8 * right_bytes)) ^ right


@functools.cache
def _power(exponent: int) -> int:
    """Returns the remainder of a power of x."""
    if exponent < 32:
        return 1 << 31 - exponent
    half = _power(exponent // 2)
    square = _product(half, half)
    return _product(square, _power(1)) if exponent % 2 else square


def _product(left: int, right: int) -> int:
    """Returns the remainder of the product of two remainders."""
    product = 0
    for bit in reversed(range(32)):
        product ^= right if left >> bit & 1 else 0
        right = right >> 1 ^ (_POLYNOMIAL if right & 1 else 0)
    return product


def _sum_part(source: int | epath.Path, begin: int) -> int:
    """Returns the CRC-32 of the part at offset `begin` of an open file (its descriptor) or of a file at a path."""
    if isinstance(source, int):
        return _sum_read(lambda buffer, done: os.preadv(source, [buffer], begin + done))
    with source.open("rb") as opened:
        file: Any = opened
        file.seek(begin)
        return _sum_read(lambda buffer, done: file.readinto(buffer))


def _sum_read(read: Callable[[memoryview, int], int]) -> int:
    crc, done, buffer = 0, 0, memoryview(bytearray(_BUFFER_BYTES))
    while size := read(buffer[: min(_PART_BYTES - done, _BUFFER_BYTES)], done):
        crc, done = zlib.crc32(buffer[:size], crc), done + size
        if done == _PART_BYTES:
            break
    return crc
