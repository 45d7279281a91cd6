"""The CRC-32 of a file is that of its parts, however it is cut: against zlib's of the whole."""

import os
import random
import zlib

import pytest
from etils import epath

from gtp_jax.checkpoint import _sums
from gtp_jax.checkpoint._crc import joined


def test_joined_parts_have_the_crc_of_the_whole():
    rng = random.Random()
    for size in (0, 1, 2, 3, 255, 256, 1000, 70_001):
        data = rng.randbytes(size)
        for cut in {0, size, *(rng.randint(0, size) for _ in range(8))}:
            left, right = data[:cut], data[cut:]
            assert joined(zlib.crc32(left), zlib.crc32(right), len(right)) == zlib.crc32(data), (size, cut)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 50_000])
def test_a_file_read_in_parts_by_threads_has_the_crc_of_the_whole(tmp_path, monkeypatch, size):
    monkeypatch.setattr(_sums, "_PART_BYTES", 4096)
    data = os.urandom(size)
    (tmp_path / "a").write_bytes(data)
    (tmp_path / "b").write_bytes(data[::-1])
    wanted = {"a": [size, zlib.crc32(data)], "b": [size, zlib.crc32(data[::-1])]}
    assert _sums._sum(epath.Path(tmp_path), ["a", "b"]) == wanted
