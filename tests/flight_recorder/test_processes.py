"""A process that is stopped in the middle of a step, or slow before one, is named, with the layer in which the others
wait. The run goes on with it. One that skips a collective of the others, or leaves them, is named too."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import gtp_jax

from ..hosts.hosts import hosts

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("program.py")
LAYER = r"(in|after) (forward|backward) of layers\.[012]"


def step_of(folder, process):
    words = (folder / f"step{process}").read_text().split() if (folder / f"step{process}").exists() else []
    return int(words[0]) if words else 0


def wait(condition, seconds, said):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, said()[-3000:]
        time.sleep(0.02)


def go_on(folder, processes, said):
    before = [step_of(folder, i) for i in range(processes)]
    wait(lambda: all(step_of(folder, i) > before[i] + 20 for i in range(processes)), 120, said)


def sentence_after(stop, said, seconds=60):
    """Returns what a process says after `stop()`."""
    known = len(said())
    stop()
    wait(lambda: "gtp recorder: step" in said()[known:], seconds, said)
    return re.search(r"gtp recorder: (.*)", said()[known:])[1]


def end(folder, processes):
    # a number that none has reached, so that all end after the same step
    (folder / "end").write_text(str(max(step_of(folder, i) for i in range(processes)) + 500))


@contextlib.contextmanager
def running(processes, meet, folder):
    """Yields the processes of a program, and for each a function that returns its output; kills them in the end."""
    with socket.socket() as own:
        own.bind(("localhost", 0))
        port = own.getsockname()[1]
    outputs = [folder / f"out{i}.txt" for i in range(processes)]
    runs = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(i), str(processes), f"localhost:{port}", meet, str(folder)],
            stdout=outputs[i].open("w"),
            stderr=subprocess.STDOUT,
            cwd=Path(gtp_jax.__file__).parents[1],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": str(i)},  # with GTP_TEST_PLATFORM=gpu, one each
        )
        for i in range(processes)
    ]
    try:
        yield runs, [lambda path=path: path.read_text() for path in outputs]
    finally:
        for run in runs:
            run.kill()
            run.wait()


def test_a_stopped_and_a_slow_process_are_named_and_the_run_goes_on(tmp_path):
    with running(2, "folder", tmp_path) as (runs, said):
        go_on(tmp_path, 2, said[0])
        slow = sentence_after((tmp_path / "sleep1").touch, said[0])
        assert (
            "process 1 on" in slow
            and "has not begun step" in slow
            and "its Python code is in load (program.py:" in slow
        )
        assert "process 0 on" in slow and "waits for it at the beginning of a step" in slow, slow
        (tmp_path / "sleep1").unlink()
        go_on(tmp_path, 2, said[0])
        for victim in (1, 0):  # in a folder, processes compare without process 0 too
            stopped = sentence_after(lambda run=runs[victim]: run.send_signal(signal.SIGSTOP), said[1 - victim])
            assert f"process {victim} on" in stopped and "has given no sign of life for" in stopped, stopped
            assert re.search(
                rf"process {1 - victim} on \S+ waits for it ({LAYER}|at the beginning|in the up)", stopped
            ), stopped
            runs[victim].send_signal(signal.SIGCONT)
            go_on(tmp_path, 2, said[0])
        record = (tmp_path / "records" / "record-0.txt").read_text()
        assert "last stamps:" in record and "after backward of layers.0" in record and "program.py" in record
        end(tmp_path, 2)
        assert [run.wait(60) for run in runs] == [0, 0]


@pytest.mark.parametrize("processes", [2, 4])
def test_a_process_whose_step_lacks_collectives_of_the_others_is_named(processes, tmp_path):
    host, victim = socket.gethostname(), processes // 2
    with running(processes, "coordinator", tmp_path) as (_, said):
        go_on(tmp_path, processes, said[0])
        found = sentence_after((tmp_path / f"skip{victim}").touch, said[0])
    programs, *waits = found.partition("; steps took")[0].split("; ")
    place = "(in|after) (forward|backward) of (layers|Block)"
    if processes == 2:  # which of the two is right cannot be known
        two = rf"stamp number \d+ is `{place}.*` in process \d on {host} and `{place}.*` in process \d on {host}"
        assert re.search(f"hangs: processes run different programs: {two}", programs), found
        assert sorted(wait.split()[1] for wait in waits) == ["0", "1"], found
        assert all(re.match(rf"process \d on {host} waits {place}", wait) for wait in waits), found
    else:
        one = rf"stamp number \d+ is `{place}.*`, and that of the others is `{place}"
        assert re.search(f"hangs: process 2 on {host} runs another program: {one}", programs), found
        assert sorted(re.findall(r"\d", "".join(wait.partition(" on ")[0] for wait in waits))) == ["0", "1", "3"], found
        assert all(re.match(rf"process(es)? .* on {host} waits? for it {place}", wait) for wait in waits), found


def test_a_process_that_leaves_the_loop_one_step_early_is_named(tmp_path):
    with running(2, "coordinator", tmp_path) as (_, said):
        go_on(tmp_path, 2, said[0])
        found = sentence_after((tmp_path / "leave1").touch, said[0])
        host, made = socket.gethostname(), step_of(tmp_path, 1)
        assert f"step {made + 1} hangs: process 1 on {host} has closed its recorder after step {made}; " in found, found
        assert re.search(rf"process 0 on {host} waits for it (at the beginning of a step|{LAYER})", found), found


def test_a_stopped_host_is_named_over_the_coordinator(tmp_path):
    with hosts(4, tmp_path) as on:
        words = [str(PROGRAM), "{}", "4", f"{on.names[0]}:29400", "coordinator", str(tmp_path)]
        on.runs = [on.start(i, [word.format(i) for word in words], {}) for i in range(4)]
        go_on(tmp_path, 4, lambda: on.said(0))
        stopped = sentence_after(lambda: on.signal(2, signal.SIGSTOP), lambda: on.said(0))
        assert f"process 2 on {on.names[2]} has given no sign of life" in stopped, stopped
        assert "wait" in stopped.partition(";")[2] and re.search(r"process(es)? [013]", stopped), stopped
        assert not any("gtp recorder:" in on.said(i) for i in (1, 3))
        on.signal(2, signal.SIGCONT)
        go_on(tmp_path, 4, lambda: on.said(0))
        end(tmp_path, 4)
        assert on.wait(60) == [0] * 4
