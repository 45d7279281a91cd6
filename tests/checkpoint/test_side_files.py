"""Files that a step stores with its arrays: the same bytes come back, changes are found, names lead nowhere else."""

from __future__ import annotations

import errno
import json
import os
import zlib

import jax.numpy as jnp
import pytest
from messages import naming

from gtp_jax.checkpoint import Checkpoints, DamagedCheckpoint

FILES = {"tokenizer.json": b'{"a": "\xc3\xa9"}\r\n', "tokenizer.model": bytes(range(256)), "empty.txt": b""}
STATE = {"w": jnp.arange(4.0)}


@pytest.fixture
def directory(tmp_path):
    with Checkpoints(tmp_path, keep=None) as checkpoints:
        checkpoints.save(1, STATE)
        checkpoints.save(2, STATE, files=FILES)
    return tmp_path


def read(directory):
    return Checkpoints(directory, read_only=True)


def test_a_step_returns_its_files_byte_for_byte_and_one_without_files_none(directory):
    assert read(directory).files() == FILES
    assert read(directory).files(1) == {}
    assert "files" not in read(directory).manifest(1) and not (directory / "1/manifest/files").exists()
    assert [read(directory).verify(step) for step in (1, 2)] == [[], []]


def replace_by_link(file):
    other = file.parents[4] / "elsewhere.model"  # beside the directory of checkpoints
    file.rename(other)
    file.symlink_to(other)


CHANGES = {  # what happens to a file, and what is said of it
    "changed": (lambda file: file.write_bytes(bytes(range(255, -1, -1))), "changed since it was written"),
    "cut": (lambda file: file.write_bytes(b""), "0 bytes, 256 were written"),
    "gone": (lambda file: file.unlink(), "missing"),
    "link": (replace_by_link, "a link, which no checkpoint contains"),
}


@pytest.mark.parametrize("how", CHANGES)
def test_every_change_of_a_file_is_found_by_verify_files_and_restore(directory, how):
    change, said = CHANGES[how]
    file = directory / "2/manifest/files/tokenizer.model"
    change(file)
    assert [f"{file}: {said}"] == read(directory).verify(2)
    with pytest.raises(DamagedCheckpoint, match=f"tokenizer.model: {said}"):
        read(directory).files(2)
    with pytest.raises(DamagedCheckpoint, match=f"tokenizer.model: {said}"):
        read(directory).restore(STATE, 2)
    assert read(directory).restore_last_whole(STATE)[2] == 1


def test_a_file_that_is_not_part_of_the_step_is_found(directory):
    more = directory / "2/manifest/files/chat_template.jinja"
    more.write_text("more")
    assert [f"{more}: not part of the checkpoint"] == read(directory).verify(2)


REFUSED = {
    "path": ({"../a": b""}, "`files` '../a' 1 100"),
    "hidden": ({".hidden": b""}, "dot"),
    "line": ({"a\n": b""}, "printable"),
    "long": ({"\u8a9e" * 100: b""}, "255"),
    "large": ({"a": b"x" * ((64 << 20) + 1)}, "a 67108865 67108864"),
    "many": ({str(i): b"" for i in range(65)}, "65 64"),
    "text": ({"a": "text"}, "'text' a bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_could_not_be_read_again_are_refused_before_anything_is_written(tmp_path, name):
    (files, message), error = REFUSED[name], TypeError if name == "text" else ValueError
    with Checkpoints(tmp_path / "c") as checkpoints, pytest.raises(error, match=naming(message)):
        checkpoints.save(1, STATE, files=files)
    assert not (tmp_path / "c").exists()


def test_a_forged_manifest_names_no_file_elsewhere(directory):
    (directory / "2/secret").write_text("secret")
    file = directory / "2/manifest/manifest.json"
    content = json.loads(file.read_text())
    content.pop("crc32")
    content["files"]["../../secret"] = [6, ""]
    crc = f"{zlib.crc32(json.dumps(content).encode()):08x}"
    file.write_text(json.dumps({**content, "crc32": crc}))
    with pytest.raises(DamagedCheckpoint, match=naming("`files` sizes checksums")):
        read(directory).files(2)


def test_a_step_whose_files_could_not_be_written_does_not_appear(tmp_path, monkeypatch):
    def full(folder, files):
        folder.mkdir()
        (folder / "tokenizer.json").write_bytes(b"ha")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, STATE)
        checkpoints.wait()
        with monkeypatch.context() as patch, pytest.raises(OSError, match=naming("saved [1]")):
            patch.setattr("gtp_jax.checkpoint._step.write_files", full)
            checkpoints.save(2, STATE, files=FILES)
            checkpoints.wait()
        checkpoints.save(3, STATE, files=FILES)
    assert read(tmp_path).steps() == [1, 3] and read(tmp_path).files() == FILES
