"""One run writes to a directory at a time; the lock of one that is gone is taken over, and it finds out if it wakes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time

import jax.numpy as jnp
import numpy as np
import pytest
from messages import naming

from gtp_jax import TrainState
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.nn import ModelDef
from gtp_jax.runner.launch import Launch
from gtp_jax.runner.trainer import EventLog, Lock, LostLock, Ownership
from gtp_jax.runner.trainer import _lock as module
from gtp_jax.runner.trainer._log import Log
from gtp_jax.runner.trainer._peer_watch import PeerWatch
from gtp_jax.runner.trainer._recorder import Recorder

from .runs import python

# Its owner counts in its lock until it is killed.
OWNER = """
import pathlib, sys, time
from gtp_jax.runner.trainer._lock import Lock
with Lock(pathlib.Path(sys.argv[1]), beat_s=0.1).acquire() as lock:
    print("owned", flush=True)
    time.sleep(60)
"""


class Clock:
    """A reader's own clock, which a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def elsewhere(monkeypatch):
    """As if every lock were looked at from another machine, whose system knows nothing of its owner."""
    monkeypatch.setattr(module, "_SETTLE_S", 0.0)
    boots = iter(range(10**6))
    monkeypatch.setattr(module, "_boot", lambda: f"boot {next(boots)}")


def test_a_lock_that_cannot_be_written_names_its_file_and_is_in_nobodys_way(tmp_path, monkeypatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "lock"
    with monkeypatch.context() as patch, pytest.raises(OSError) as caught:
        patch.setattr(os, "fsync", full)
        Lock(path).attempt()
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    with Lock(path).acquire():
        assert list(tmp_path.iterdir()) == [path]


def test_a_lock_is_taken_over_only_after_it_was_silent_on_the_readers_clock(tmp_path, elsewhere):
    path, clock, said = tmp_path / "run" / "lock", Clock(), []
    owner = Lock(path, beat_s=1e6).acquire()  # never counts: as if it were suspended
    requeued = Lock(path, stale_s=60, patience_s=300, note=said.append, clock=clock)
    assert not requeued.attempt()
    clock.now += 59
    assert not requeued.attempt()
    os.pwrite(owner._file.fileno(), b"00000000000000000009\n", path.stat().st_size - 21)  # it lives after all
    assert not requeued.attempt()
    clock.now += 59
    assert not requeued.attempt()
    owner.ownership.check()
    clock.now += 2
    assert requeued.attempt()
    assert len(said) == 1 and "in use by process" in said[0] and "waiting until that run ends" in said[0]
    requeued.ownership.check()
    # what the owner does when it wakes
    size = path.stat().st_size
    os.pwrite(owner._file.fileno(), b"00000000000000000010\n", size - 21)
    with pytest.raises(LostLock, match=naming("lost its lock belongs process")):
        owner.ownership.check()
    owner.__exit__()
    requeued.ownership.check()  # the loser's farewell leaves the lock alone
    requeued.__exit__()
    assert not path.exists()


def test_a_run_that_goes_on_is_not_disturbed_and_names_itself(tmp_path, elsewhere):
    path, clock = tmp_path / "lock", Clock()
    with Lock(path).acquire() as owner:
        second = Lock(path, stale_s=60, patience_s=120, clock=clock)
        for count in range(6):
            os.pwrite(owner._file.fileno(), f"{count + 1:020d}\n".encode(), path.stat().st_size - 21)
            if count < 5:
                assert not second.attempt()
            clock.now += 25
        with pytest.raises(ValueError, match=naming("process still writing Wait")):
            second.attempt()
        owner.ownership.check()
    assert Lock(path).attempt()


def test_of_two_that_take_over_at_once_one_has_the_lock(tmp_path, elsewhere, monkeypatch):
    path, clock = tmp_path / "lock", Clock()
    Lock(path, beat_s=1e6).acquire()
    one, other = (Lock(path, beat_s=1e6, clock=clock) for _ in range(2))
    assert not one.attempt() and not other.attempt()
    clock.now += 61
    overtaken = []

    def settle(seconds: float) -> None:
        del seconds
        if not overtaken:  # the other has found the lock silent at the same moment, and was only slower
            overtaken.append(None)
            overtaken.append(other._take_over())

    monkeypatch.setattr(module.time, "sleep", settle)
    assert not one.attempt()
    assert overtaken == [None, True]
    other.ownership.check()


@pytest.mark.full
def test_a_killed_owner_under_the_same_system_is_followed_at_once_and_a_stopped_one_is_not(tmp_path):
    path = tmp_path / "lock"
    owner = python("-c", OWNER, path, stdout=subprocess.PIPE)
    try:
        assert owner.stdout.readline() == "owned\n"
        owner.send_signal(signal.SIGSTOP)
        follower = Lock(path)
        assert not follower.attempt()
    finally:
        owner.kill()
        owner.wait()
    began = time.monotonic()
    with follower.acquire():
        assert time.monotonic() - began < 10
        follower.ownership.check()


def test_a_file_that_is_no_lock_is_refused_and_stays(tmp_path, elsewhere):
    path, clock = tmp_path / "lock", Clock()
    path.write_text("12345\n")
    with pytest.raises(ValueError, match=naming("lock 12345 --out")):
        Lock(path).attempt()
    for content in ("", "12345"):  # a lock looks so while it is written, but not for so long
        path.write_text(content)
        late = Lock(path, stale_s=60, clock=clock)
        assert not late.attempt()
        clock.now += 61
        with pytest.raises(ValueError, match=naming(f"lock '{content}'")):
            late.attempt()
        assert path.read_text() == content


def test_who_has_lost_the_lock_publishes_prunes_and_logs_nothing(tmp_path):
    state = TrainState({"w": jnp.ones(3)}, (), jnp.int32(0), ModelDef(None, None, {}, {}))
    lock = Lock(tmp_path / "lock").acquire()
    log = Log(tmp_path / "log.jsonl", 0, lock.ownership.check)
    recorder = Recorder(PeerWatch(Launch()))
    recorder.events = EventLog(tmp_path / "events.jsonl", guard=lock.ownership.check)
    with Checkpoints(tmp_path / "c", keep=1, guard=lock.ownership.check) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        log.write(1, loss=2.0)
        recorder.write("start")
        (tmp_path / "lock").write_text("another\n\nprocess 7 on \x1b[31melsewhere\n")
        before = [(tmp_path / name).read_text() for name in ("log.jsonl", "events.jsonl")]
        with pytest.raises(LostLock, match=naming("process 7 [31melsewhere")):
            log.write(2, loss=1.0)
        with pytest.raises(LostLock):
            Log(tmp_path / "log.jsonl", 0, lock.ownership.check)  # would empty the file
        with pytest.raises(LostLock):
            recorder.write("save")
        recorder.end("failed")  # which must not keep the process from ending
        with pytest.raises(LostLock):
            checkpoints.save(2, state)
            checkpoints.wait()
        with pytest.raises(LostLock):
            checkpoints.set_aside_after(0)
    lost = f"lost lock {tmp_path}/lock"
    with pytest.raises(LostLock, match=naming(lost)), Checkpoints(tmp_path / "c", guard=lock.ownership.check) as late:
        late.save(3, state)
    assert Checkpoints(tmp_path / "c", read_only=True).steps() == [1]
    assert [(tmp_path / name).read_text() for name in ("log.jsonl", "events.jsonl")] == before
    np.testing.assert_array_equal(Checkpoints(tmp_path / "c").restore(state)[0].params["w"], 1)
    (tmp_path / "lock").unlink()
    with pytest.raises(LostLock, match=naming(f"{lost} deleted")):
        Ownership(tmp_path / "lock", "x").check()
    lock.__exit__()
