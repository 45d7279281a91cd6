"""Signals end a run in every phase, all processes after the same step, with the status that tells what to do next."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import signal
import subprocess
import threading
import time

import jax
import pytest
from messages import naming

from gtp_jax.checkpoint import Checkpoints
from gtp_jax.runner._exit_codes import DIVERGED, FAILED, MISTAKE, RETRY, of_error
from gtp_jax.runner.cli import main
from gtp_jax.runner.launch import Launch, NoCoordinator
from gtp_jax.runner.trainer import Diverged, TrainConfig, _family, _settings_task
from gtp_jax.runner.trainer._interrupt import SIGNALS, Interrupt, Stopped
from gtp_jax.runner.trainer._peer_watch import PeerWatch
from gtp_jax.runner.trainer._peers import Peers

from .runs import python, small
from .test_agreement import launches


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("a flag"), MISTAKE),
        (FileNotFoundError(errno.ENOENT, "no text"), MISTAKE),
        (PermissionError(errno.EACCES, "not ours"), MISTAKE),
        (OSError(errno.ENOSPC, "disk is full"), RETRY),
        (OSError(errno.EFBIG, "limit of sizes"), RETRY),
        (OSError(errno.ESTALE, "file system is gone"), RETRY),
        (NoCoordinator("nobody came"), RETRY),
        (jax.errors.JaxRuntimeError("INTERNAL: NCCL"), RETRY),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 80 GB"), MISTAKE),
        (Diverged("nan"), DIVERGED),
        (KeyError("ours"), FAILED),
        (Stopped(signal.SIGUSR1), 138),
    ],
)
def test_status_says_what_to_do_next(error, code):
    assert of_error(error) == code


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_outside_the_loop_ends_python_at_once(number):
    before = signal.getsignal(number)
    with pytest.raises(Stopped, match=naming(f"{number.name}")) as caught:
        with Interrupt(Launch(), PeerWatch(Launch())):
            os.kill(os.getpid(), number)
            time.sleep(5)
    assert caught.value.exit_code == 128 + number
    assert signal.getsignal(number) == before


@pytest.mark.parametrize(
    ("place", "saved", "flags", "said"),
    [
        ((_settings_task, "read_corpus"), [1, 3], ["--resume"], "step 3"),
        ((_family.FamilyTask, "prepare"), [], ["--resume"], "no checkpoint --resume"),
        ((_family.FamilyTask, "prepare"), [1, 3], ["--force"], "Nothing saved"),
    ],
)
def test_a_signal_at_the_start_says_what_is_saved(text, tmp_path, monkeypatch, capsys, place, saved, flags, said):
    out = tmp_path / "run"
    settings = small(text, out, num_layers=None)
    if flags:
        out.mkdir()
        TrainConfig(out=str(out), data=(str(text),), seq=32, batch=8).save(out / "config.json")
    with Checkpoints(out / "checkpoints") if saved else contextlib.nullcontext() as checkpoints:
        for step in saved:
            checkpoints.save(step, {"w": jax.numpy.ones(2)}, extra={})
    reach = getattr(*place)

    def signalled(*args, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return reach(*args, **options)

    monkeypatch.setattr(*place, signalled)
    assert main(["train", *settings, *flags]) == 143
    assert re.search(naming(f"process 0 SIGTERM {said}"), capsys.readouterr().err)


def test_signal_in_the_loop_waits_for_the_step():
    with Interrupt(Launch(), PeerWatch(Launch())) as interrupt, interrupt.loop():
        assert not interrupt.requested(7)
        os.kill(os.getpid(), signal.SIGUSR1)
        deadline = time.monotonic() + 5
        while interrupt.signal is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert interrupt.requested(8) and interrupt.signal == signal.SIGUSR1 and interrupt.saves


def play(grace_s: float | None, save_s: list[float], asks: list[int], seed: int) -> list[tuple[int, bool, int | None]]:
    """Steps of processes that wait for each other within each, as collectives do, until a signal comes to some."""
    count = len(save_s)
    steps = threading.Barrier(count)
    results: list[tuple[int, bool, int | None]] = [(-1, False, None)] * count

    def run(launch: Launch) -> None:
        random_s = random.Random(seed * 100 + launch.process)
        interrupt = Interrupt(launch, PeerWatch(launch))
        with Peers(launch) as peers:
            peers.ask(None, len)
            interrupt.attend(peers, None)
            interrupt._grace_s = grace_s
            interrupt._arm = lambda number: setattr(interrupt, "signal", interrupt.signal or number)  # no alarm
            interrupt.saved(save_s[launch.process])
            peers.listen(interrupt.heard)
            if launch.process in asks:
                threading.Timer(random_s.uniform(0, 0.3), interrupt._request, (signal.SIGTERM,)).start()
            step = 0
            while not interrupt.requested(step):
                time.sleep(random_s.uniform(0, 0.01))
                steps.wait(10)
                step += 1
            results[launch.process] = step, interrupt.saves, interrupt.signal
            steps.wait(10)  # else a connection could close while another process still needs it

    threads = [threading.Thread(target=run, args=(launch,)) for launch in launches(*range(count))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


@pytest.mark.parametrize(("asks", "seed"), [([2], 2), pytest.param([0, 1, 2], 3, marks=pytest.mark.full)])
def test_all_processes_stop_after_the_same_step(asks, seed):
    results = play(None, [0.0] * 3, asks, seed)
    assert len(set(results)) == 1, results
    assert results[0][1:] == (True, signal.SIGTERM)


@pytest.mark.parametrize(("grace_s", "saves"), [(10.0, True), (4.0, False)])
def test_no_process_saves_if_one_needs_longer_than_the_grace(grace_s, saves):
    results = play(grace_s, [1.0, 5.0], [0], seed=5)
    assert [result[1] for result in results] == [saves] * 2


_BUSY = """
import hashlib, sys
from pathlib import Path
from gtp_jax.runner.launch import Launch
from gtp_jax.runner.trainer import RunDirectory
from gtp_jax.runner.trainer._interrupt import Interrupt
from gtp_jax.runner.trainer._peer_watch import PeerWatch
from gtp_jax.runner.trainer._peers import Peers
launch = Launch()
watch = PeerWatch(launch)
with Interrupt(launch, watch) as interrupt, watch, Peers(launch) as peers:
    watch.attend(peers, RunDirectory(Path(sys.argv[1])))
    interrupt.attend(peers, GRACE)
    interrupt.own(RunDirectory(Path(sys.argv[1])))
    print("ready", flush=True)
    with LOOP:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # minutes of native code, as compilation is
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop", "grace", "message"),
    [("open('/dev/null')", "None", "SIGTERM 3 s"), ("interrupt.loop()", "2", "SIGTERM 2 s --grace")],
)
def test_native_code_and_a_save_that_does_not_fit_are_ended_with_the_last_checkpoint(loop, grace, message, tmp_path):
    TrainConfig().save(tmp_path / "config.json")
    code = _BUSY.replace("LOOP", loop).replace("GRACE", grace)
    run = python("-c", code, tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout is not None and run.stdout.readline() == "ready\n"
    began = time.monotonic()
    run.send_signal(signal.SIGTERM)
    _, errors = run.communicate(timeout=40)
    assert run.returncode == 143 and time.monotonic() - began < 20
    assert re.search(naming(f"process 0 {message} no checkpoint"), errors)
    assert errors.count("There is no checkpoint yet") == 1
