"""A process that waits for nothing ends itself, and says why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gtp_jax

# A peer is played by a file; the watch is that of a real process, which must end.
_WATCHED = """
import sys, threading, time
from pathlib import Path
from gtp_jax.trainer._directory import RunDirectory
from gtp_jax.trainer._distributed import Launch
from gtp_jax.trainer._peer_watch import PeerWatch

directory = RunDirectory(Path(sys.argv[1]))
directory.alive.mkdir(parents=True)
peer = directory.alive / "1"
def play():
    for beat in range(10**6):
        {peer}
        time.sleep(0.2)
threading.Thread(target=play, daemon=True).start()
with PeerWatch(directory, Launch(processes=2), silent_s=3, stalled_s={stalled}) as watch:
    watch.doing("step")
    time.sleep({length})
print("ended well")
"""


def watched(tmp_path: Path, peer: str, *, stalled: float = 100, length: float = 60) -> subprocess.CompletedProcess[str]:
    root = str(Path(gtp_jax.__file__).parents[1])
    code = _WATCHED.format(peer=peer, stalled=stalled, length=length)
    environment = {**os.environ, "PYTHONPATH": root}
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, env=environment)


@pytest.mark.parametrize(
    ("peer", "reason"),
    [
        ("time.sleep(99)", "process 1 has given no sign of life for 3 s (in"),
        ("peer.write_text('same running')", "process 1 has given no sign of life for 3 s."),
        ("peer.write_text(f'{beat} failed')", "process 1 ended with an error, which its own output shows."),
    ],
)
def test_peer_that_is_silent_or_failed_ends_the_process(peer, reason, tmp_path):
    done = watched(tmp_path, peer)
    assert done.returncode == 1
    assert f"gtp-jax: process 0 cannot go on: {reason}" in done.stderr
    assert "There is no checkpoint yet; start again from the beginning with: gtp-jax train --resume" in done.stderr
    assert (tmp_path / "run" / "alive" / "0").read_text().endswith("failed")


def test_run_that_stands_still_ends_though_all_live(tmp_path):
    done = watched(tmp_path, "peer.write_text(f'{beat} running')", stalled=4)
    assert done.returncode == 1
    assert "no step has ended for 4 s, though all processes are alive" in done.stderr


def test_peer_that_is_done_is_not_missed(tmp_path):
    done = watched(tmp_path, "peer.write_text('7 done')", length=6)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ended well\n"
    assert done.stderr == ""
    assert (tmp_path / "run" / "alive" / "0").read_text().endswith("done")
