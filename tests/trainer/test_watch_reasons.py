"""A process that waits for nothing ends itself, and says why, with a status that says whether to try again."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from messages import naming

from gtp_jax.runner._exit_codes import MISTAKE, RETRY
from gtp_jax.runner.flags import settings_of
from gtp_jax.runner.launch import Launch
from gtp_jax.runner.trainer import RunDirectory, TrainConfig, _peer_watch
from gtp_jax.runner.trainer._interrupt import Interrupt
from gtp_jax.runner.trainer._peer_watch import PeerWatch
from gtp_jax.runner.trainer._peers import Peers

from .runs import python

# A peer is played by a thread with a connection of its own; the watch is that of a real process, which must end.
_WATCHED = """
import ctypes, socket, sys, threading, time
from pathlib import Path
from gtp_jax.runner.launch import Launch
from gtp_jax.runner.trainer._clock import LIMITS_S, PhaseClock
from gtp_jax.runner.trainer._directory import RunDirectory
from gtp_jax.runner.trainer._peer_watch import PeerWatch
from gtp_jax.runner.trainer._peers import Peers

directory = RunDirectory(Path(sys.argv[1]))
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"

def play():
    with Peers(Launch(2, 1, address)) as peers:
        beat = lambda: peers.tell({"beat": {"step": 1, "activity": "save", "for_s": 7.0, "times": {}}})
        beat()
        PEER

threading.Thread(target=play, daemon=True).start()
clock = PhaseClock(limits_s={**LIMITS_S, "step": MOST}, silent_s=3)
with PeerWatch(Launch(2, 0, address), clock=clock, frozen_s=3) as watch, Peers(Launch(2, 0, address)) as peers:
    watch.attend(peers, directory)
    peers.listen(watch.heard)
    for step in range(3):
        watch.doing("step", step)
    SELF
print("ended well")
"""


def watched(tmp_path: Path, peer: str, itself: str = "time.sleep(60)", *, limit_s: float = 100) -> tuple[int, str, str]:
    """The status, the output and the errors of a process that is watched."""
    code = _WATCHED.replace("PEER", peer).replace("SELF", itself).replace("MOST", str(limit_s))
    run = python("-c", code, tmp_path / "run", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        printed, errors = run.communicate(timeout=50)
    finally:
        run.kill()
    return run.returncode, printed, errors


BEATS = "[(time.sleep(0.5), beat()) for _ in range(100)]"


@pytest.mark.full
def test_limit_shows_stacks_phase_and_who_is_behind(tmp_path):
    RunDirectory(tmp_path / "run").prepare(settings_of(TrainConfig()), keep=False)
    status, printed, errors = watched(tmp_path, BEATS, "threading.Event().wait(60)", limit_s=3)
    assert status == RETRY
    assert re.search(naming("process 0 `step` step 2"), errors)
    assert re.search(naming("3 s process 1 (step 1, save for 7 s)"), errors)
    assert errors.count("most recent call first") >= 3 and "in play" in errors and "in wait" in errors
    assert re.search(naming("no checkpoint --resume"), errors)


class Ended(Exception):
    """In place of the end of this process."""


@pytest.mark.parametrize("words", [PeerWatch.give_up, Interrupt._end])
def test_broken_output_and_unreadable_checkpoints_keep_no_process_from_ending(words, tmp_path, monkeypatch):
    def unreadable(self):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def end(status):
        raise Ended(status)

    ours, theirs = os.pipe()
    os.close(ours)  # as of a terminal that is gone
    monkeypatch.setattr("gtp_jax.runner.trainer._directory.Checkpoints.latest", unreadable)
    monkeypatch.setattr(os, "_exit", end)
    watch = PeerWatch(Launch())
    interrupt = Interrupt(Launch(), watch)
    watch._directory = interrupt._directory = RunDirectory(tmp_path)
    with open(theirs, "w", buffering=1) as gone:
        monkeypatch.setattr("sys.stderr", gone)
        with pytest.raises(Ended) as ended:
            words(watch, ValueError("no"), "no") if words is PeerWatch.give_up else words(interrupt, 15, "no")
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            gone.close()
    assert ended.value.args == (MISTAKE if words is PeerWatch.give_up else 128 + 15,)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("peer", "reason", "status"),
    [
        ("time.sleep(99)", "process 1 3 s", RETRY),
        ('peers.tell({"failed": "no disk", "code": 2}); time.sleep(9)', "no disk", MISTAKE),
        ("peers._lines[0]._socket.shutdown(2); time.sleep(9)", "process 1 ended", RETRY),
    ],
)
def test_peer_that_is_silent_gone_or_failed_ends_the_process(peer, reason, status, tmp_path):
    ended, _, errors = watched(tmp_path, peer)
    assert ended == status, errors
    assert re.search(naming(f"process 0 {reason}"), errors)


@pytest.mark.slow
def test_held_lock_of_python_is_ended_from_outside_with_all_stacks(tmp_path):
    status, printed, errors = watched(tmp_path, BEATS, "ctypes.PyDLL(None).sleep(40)")
    assert status == -signal.SIGABRT, errors
    assert "Fatal Python error: Aborted" in errors and "in play" in errors
    assert re.search(naming("process 0 Python 3 s"), errors)


def test_a_watch_goes_on_without_its_child_and_after_an_error_of_its_own(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(_peer_watch, "TICK_S", 0.05)
    ticks = []

    def fail(beat) -> None:
        ticks.append(beat)
        raise OSError("no room for a beat")

    with PeerWatch(Launch()) as watch, Peers(Launch()) as peers:
        watch.attend(peers, RunDirectory(tmp_path))
        watch._guard._child.kill()
        watch._guard._child.wait()
        monkeypatch.setattr(watch, "_beat", fail)
        while len(ticks) < 3:
            time.sleep(0.02)
    assert re.search(naming("OSError beat"), capfd.readouterr().err)


@pytest.mark.slow
def test_peer_that_is_done_is_not_missed(tmp_path):
    status, printed, errors = watched(tmp_path, "pass", "time.sleep(6)")
    assert status == 0, errors
    assert printed == "ended well\n"
    assert errors == ""
