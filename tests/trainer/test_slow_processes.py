"""Of processes that wait for each other in every step, only the slow one is named, whatever the time is on it."""

from __future__ import annotations

import signal
import socket
import subprocess
import time

import pytest

from ..hosts.clocks import Clock
from .runs import python

# Steps that end together, as collectives make them; batches and launches take each process its own time.
_PROCESS = """
import socket, sys, time
from pathlib import Path
from gtp_jax.runner.launch import Launch
from gtp_jax.runner.trainer import RunDirectory
from gtp_jax.runner.trainer import _peer_watch
from gtp_jax.runner.trainer._peer_watch import PeerWatch
from gtp_jax.runner.trainer._peers import Peers
from gtp_jax.runner.trainer._slow import timed_batches

_peer_watch._SLOW_EVERY_S = 1.0
process, address, out = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
launch = Launch(2, process, address)

def batches():
    while True:
        began = time.thread_time()
        while time.thread_time() - began < 0.004:
            pass
        yield None

with PeerWatch(launch) as watch, Peers(launch) as peers:
    peers.ask(None, len)
    watch.attend(peers, RunDirectory(out))
    peers.listen(watch.heard)
    print("ready", flush=True)
    for step, _ in enumerate(timed_batches(watch, batches())):
        watch.doing("step", step)
        time.sleep(max(0.0, 0.1 - time.time() % 0.1))  # the end of the step, for all
"""


@pytest.mark.slow
def test_only_the_slow_host_is_named(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    files = [tmp_path / f"{i}.txt" for i in range(2)]
    clocks = [Clock(tmp_path / f"clock{i}") for i in range(2)]
    clocks[1].set(3600)
    runs = [
        python(
            *("-c", _PROCESS, i, address, tmp_path / "run"),
            env={"JAX_PLATFORMS": "cpu", **clocks[i].environment},
            stdout=file.open("w"),
            stderr=subprocess.STDOUT,
        )
        for i, file in enumerate(files)
    ]
    try:
        deadline = time.monotonic() + 90
        while not all("ready" in file.read_text() for file in files):
            assert time.monotonic() < deadline, files[0].read_text()
            time.sleep(0.1)
        clocks[0].set(7200)
        deadline = time.monotonic() + 90
        while "slow: " not in files[0].read_text() and time.monotonic() < deadline:
            runs[1].send_signal(signal.SIGSTOP)  # a host that does other work nine tenths of the time
            time.sleep(0.045)
            runs[1].send_signal(signal.SIGCONT)
            time.sleep(0.005)
        said = [line for line in files[0].read_text().splitlines() if "slow: " in line]
    finally:
        for run in runs:
            run.kill()
            run.wait()
    assert said and all("slow: process 1: " in line for line in said), said
    assert any("process 1: input takes" in line for line in said), said
