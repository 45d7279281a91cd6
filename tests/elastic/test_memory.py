"""The directory in memory: room is checked, what a dead owner left is freed, and what is half-written is not used."""

from __future__ import annotations

import fcntl
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from messages import naming

from gtp_jax.checkpoint import Checkpoints
from gtp_jax.runner.elastic import _memory
from gtp_jax.runner.elastic._memory import Memory, check_room

from .fleets import ROOT

_OWNER = """
import sys, time
from pathlib import Path
from gtp_jax.runner.elastic._memory import Memory
memory = Memory(Path(sys.argv[1]))
print(memory.root, flush=True)
time.sleep(600)
"""


@pytest.fixture
def other(tmp_path):
    """Another process that owns a directory below `tmp_path`, and that directory."""
    owner = subprocess.Popen([sys.executable, "-c", _OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert owner.stdout is not None
    yield owner, type(tmp_path)(owner.stdout.readline().strip())
    owner.kill()
    owner.wait()


def state(value: float) -> dict[str, jax.Array]:
    return {"w": jax.device_put(jnp.full((4, 2), value), jax.devices()[0])}


@pytest.mark.full
def test_what_a_dead_owner_left_is_freed_and_what_a_living_one_holds_is_not(other, tmp_path):
    owner, theirs = other
    with Memory(tmp_path) as mine:
        assert mine.freed == [] and theirs.exists()
    assert not mine.root.exists()
    owner.kill()
    owner.wait()
    with Memory(tmp_path) as mine:
        assert mine.freed == [theirs] and not theirs.exists()


def test_a_directory_that_another_run_frees_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    lock, freed = fcntl.flock, []

    def late(file, operation):
        if not freed:
            freed.append(_memory._free_if_left_over(*tmp_path.iterdir()) if operation == fcntl.LOCK_EX else False)
        lock(file, operation)

    def other_run(path):
        with monkeypatch.context() as patch:
            patch.setattr(fcntl, "flock", lock)
            return free(path)

    free = _memory._free_if_left_over
    monkeypatch.setattr(_memory, "_free_if_left_over", other_run)
    monkeypatch.setattr(fcntl, "flock", late)
    with Memory(tmp_path) as memory:
        assert freed == [True] and list(tmp_path.iterdir()) == [memory.root]
        monkeypatch.undo()
        with Memory(tmp_path) as other:
            assert other.freed == [] and memory.root.exists()


def test_only_a_committed_snapshot_counts_and_leftovers_are_swept(tmp_path):
    with Memory(tmp_path) as memory:
        assert memory.latest() is None
        with Checkpoints(memory.snapshots, keep=1) as snapshots:
            snapshots.save(3, state(3.0))
        torn = memory.snapshots / "5.orbax-checkpoint-tmp"
        torn.mkdir()
        (torn / "arrays").write_text("half of it")
        assert memory.latest() == 3
        memory.sweep()
        assert not torn.exists() and memory.latest() == 3
        memory.drop_latest()
        assert memory.latest() is None


def test_the_older_snapshot_is_there_until_the_newer_one_counts(tmp_path, monkeypatch):
    with Memory(tmp_path) as memory, Checkpoints(memory.snapshots, keep=1) as snapshots:
        snapshots.save(1, state(1.0))
        snapshots.wait()
        listed = []
        for step in range(2, 6):
            snapshots.save(step, state(float(step)))
            while memory.latest() != step:
                listed.append(memory.latest())
            snapshots.wait()
            assert Checkpoints(memory.snapshots, read_only=True).steps() == [step]
        assert listed and None not in listed


def test_a_directory_without_room_for_two_and_one_that_is_none_are_refused(tmp_path):
    check_room(tmp_path, 1)
    with pytest.raises(ValueError, match=naming("two snapshots 2000000.00 GB")):
        check_room(tmp_path, 10**15)
    with pytest.raises(ValueError, match=naming("`snapshot_dir` missing")):
        Memory(tmp_path / "missing")
