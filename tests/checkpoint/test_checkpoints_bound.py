"""A step is what was saved under its number, and a damaged one does not cost the run."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from messages import naming
from selection import others_full

from gtp_jax.checkpoint import Checkpoints, DamagedCheckpoint
from gtp_jax.checkpoint import _agreement as agreement
from gtp_jax.checkpoint import _step as step_module
from gtp_jax.runner.cli import main


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(agreement, "PAUSES", (0.0, 0.0))


@pytest.fixture(scope="module")
def saved(tmp_path_factory, plain):
    """A state, and checkpoints of it at steps 2, 4 and 6."""
    directory = tmp_path_factory.mktemp("saved")
    with Checkpoints(directory, keep=None) as checkpoints:
        for step in (2, 4, 6):
            checkpoints.save(step, plain({"w": jnp.full((4, 3), step), "b": jnp.ones(5)}), {"text": "abc"})
    return plain({"w": jnp.zeros((4, 3), int), "b": jnp.ones(5)}), directory


@pytest.fixture
def copy(saved, tmp_path):
    return Path(shutil.copytree(saved[1], tmp_path / "run"))


def damage(directory: Path, step: int) -> Path:
    """Changes a byte of a file that every restore reads."""
    path = directory / str(step) / "arrays" / "manifest.ocdbt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    return path


def test_a_step_under_another_number_is_not_whole(saved, copy, capsys):
    (copy / "6").rename(copy / "8")
    checkpoints = Checkpoints(copy, read_only=True)
    (line,) = checkpoints.verify(8)
    named = naming("step 6; renamed")
    assert re.search(named, line)
    with pytest.raises(DamagedCheckpoint, match=named):
        checkpoints.restore(saved[0], 8)
    assert main(["checkpoint", "verify", str(copy)]) == 1
    assert "step 4: whole\nstep 8: 1 file(s) damaged\n" in capsys.readouterr().out


@pytest.mark.parametrize("part", ["arrays", "manifest"])
def test_parts_of_two_steps_are_not_whole_though_each_is_as_it_was_written(part, saved, copy):
    shutil.rmtree(copy / "4" / part)
    shutil.copytree(copy / "2" / part, copy / "4" / part)
    checkpoints = Checkpoints(copy, read_only=True)
    lines = checkpoints.verify(4)
    message = naming("arrays manifest" if part == "arrays" else "step 2;")
    assert len(lines) == 1 and re.search(message, lines[0])
    for call in (lambda: checkpoints.restore(saved[0], 4), lambda: checkpoints.arrays(4)):
        with pytest.raises(DamagedCheckpoint, match=message):
            call()


def test_a_run_goes_on_before_the_damage_saves_past_it_and_prunes(saved, copy, plain, capsys):
    wrong = damage(copy, 6)
    missing = next((copy / "4" / "arrays" / "d").iterdir())
    missing.unlink()
    passed = {}
    with Checkpoints(copy, keep=2) as checkpoints:
        state, extra, step = checkpoints.restore_last_whole(saved[0], lambda step, error: passed.update({step: error}))
        assert step == 2 and extra == {"text": "abc"} and (np.asarray(state.params["w"]) == 2).all()
        assert list(passed) == [6, 4]
        assert f"{wrong}: changed since it was written" in passed[6].lines
        assert f"{missing}: missing" in passed[4].lines
        kept = checkpoints.set_aside_after(step, passed)
        assert kept == [str(copy / "4.damaged"), str(copy / "6.damaged")] and checkpoints.steps() == [2]
        for step in (4, 6, 8):
            checkpoints.save(step, plain({"w": jnp.full((4, 3), 10 * step), "b": jnp.ones(5)}))
            checkpoints.wait()
        assert checkpoints.steps() == [6, 8]  # those set aside count for nothing
        # back to 6 because somebody wants it: 8 is whole, and abandoned
        assert checkpoints.set_aside_after(6) == [str(copy / "8.abandoned")]
        checkpoints.save(8, state)
        checkpoints.wait()
        assert checkpoints.set_aside_after(6, [8]) == [str(copy / "8.damaged")]
        checkpoints.save(8, state)
        checkpoints.wait()
        assert checkpoints.set_aside_after(6) == [str(copy / "8.abandoned-2")]
    assert sorted(p.name for p in copy.iterdir()) == [
        "4.damaged", "6", "6.damaged", "8.abandoned", "8.abandoned-2", "8.damaged",
    ]  # fmt: skip
    assert Checkpoints(copy).verify(6) == []


def test_the_number_of_a_step_may_have_64_bits_and_the_name_of_a_folder_more(tmp_path, plain):
    last = 2**63 - 1
    with Checkpoints(tmp_path, keep=None) as checkpoints:
        for step in (3, 2**31, last):
            checkpoints.save(step, plain({"w": jnp.full(2, step % 5)}))
            restored, _, found = checkpoints.restore_last_whole(plain({"w": jnp.zeros(2, int)}))
            assert found == step and (restored.params["w"] == step % 5).all() and checkpoints.verify(step) == []
        with pytest.raises(ValueError, match=naming(f"`step` {last + 1} {last}")):
            checkpoints.save(last + 1, restored)
        assert checkpoints.set_aside_after(3) != []
        backups = ["202611281234", "9" * 30]
        for name in backups:
            (tmp_path / name).mkdir()
        skipped = []
        assert checkpoints.restore_last_whole(restored, lambda step, _: skipped.append(str(step)))[2] == 3
        assert skipped == backups[::-1]
        assert all(checkpoints.verify(int(name)) for name in backups)


def test_all_steps_damaged_is_an_error_and_renames_nothing(saved, copy):
    for step in (2, 4, 6):
        damage(copy, step)
    with pytest.raises(DamagedCheckpoint, match=naming("6 damaged")):
        Checkpoints(copy).restore_last_whole(saved[0])
    assert Checkpoints(copy).steps() == [2, 4, 6]
    with pytest.raises(FileNotFoundError, match=naming(f"{copy}/none")):
        Checkpoints(copy / "none").restore_last_whole(saved[0])


@pytest.mark.parametrize("number", others_full([errno.EIO, errno.ESTALE, errno.EACCES], [errno.EIO]))
def test_a_read_that_fails_is_tried_again_and_then_ends_the_run(number, saved, copy, monkeypatch):
    attempts = []
    read = step_module.read_arrays

    def failing(*args, **kwargs):
        attempts.append(None)
        if len(attempts) < times:
            raise OSError(number, os.strerror(number))
        return read(*args, **kwargs)

    monkeypatch.setattr("gtp_jax.checkpoint._checkpoints.read_arrays", failing)
    times = 3
    _, _, step = Checkpoints(copy).restore_last_whole(saved[0])
    assert step == 6 and len(attempts) == 3
    attempts.clear()
    times = 99
    wanted = naming(f"6 3 attempts damaged: {os.strerror(number)}")
    with pytest.raises(OSError, match=wanted):
        Checkpoints(copy).restore_last_whole(saved[0])
    assert len(attempts) == 3 and Checkpoints(copy).steps() == [2, 4, 6]


@pytest.mark.parametrize("umask", others_full([0o027, 0o000, 0o077], [0o027]), ids=oct)
def test_files_have_the_users_umask(umask, tmp_path, plain):
    before = os.umask(umask)
    try:
        with Checkpoints(tmp_path / "run") as checkpoints:
            checkpoints.save(1, plain({"w": jnp.ones((64, 64))}))
    finally:
        os.umask(before)
    found: dict[bool, set[int]] = {True: set(), False: set()}
    for path in [tmp_path / "run", *(tmp_path / "run").rglob("*")]:
        found[path.is_dir()].add(path.stat().st_mode & 0o777)
    assert found == {True: {0o777 & ~umask}, False: {0o666 & ~umask}}
