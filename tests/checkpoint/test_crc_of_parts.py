"""The CRC-32 of a file is that of its parts, however it is cut: against zlib's of the whole."""

import os
import random
import zlib

import pytest
from etils import epath

from gtp_jax.checkpoint import _file_sums


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(_file_sums, "_PART_BYTES", 4096)


@pytest.mark.parametrize("size", [0, 4095, 4096, 4097, 50_000])
def test_a_file_read_in_parts_by_threads_has_the_crc_of_the_whole(tmp_path, size):
    data = os.urandom(size)
    (tmp_path / "a").write_bytes(data)
    (tmp_path / "b").write_bytes(data[::-1])
    wanted = {"a": [size, zlib.crc32(data)], "b": [size, zlib.crc32(data[::-1])]}
    with _file_sums.FileSums(epath.Path(tmp_path)) as sums:
        assert sums.finish(["a", "b"]) == wanted


def test_a_file_followed_while_it_grows_and_is_renamed_has_the_crc_of_the_whole(tmp_path):
    rng = random.Random()
    with _file_sums.FileSums(epath.Path(tmp_path)) as sums, (tmp_path / "growing").open("wb", buffering=0) as file:
        data = b""
        for _ in range(40):
            more = rng.randbytes(rng.randrange(9000))
            file.write(more)
            data += more
            sums.follow(["growing", "gone"])
        assert len(data) > 4096
        (tmp_path / "growing").rename(tmp_path / "whole")
        assert sums.finish(["whole"]) == {"whole": [len(data), zlib.crc32(data)]}


def test_a_file_in_the_place_of_one_that_was_followed_is_summed_anew(tmp_path):
    (tmp_path / "old").write_bytes(os.urandom(10_000))
    data = os.urandom(9_000)
    with _file_sums.FileSums(epath.Path(tmp_path)) as sums:
        sums.follow(["old"])
        (tmp_path / "new").write_bytes(data)
        (tmp_path / "new").replace(tmp_path / "old")
        assert sums.finish(["old"]) == {"old": [len(data), zlib.crc32(data)]}
