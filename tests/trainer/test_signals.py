"""Signals end a run in every phase, all processes after the same step, with the status that tells what to do next."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest

import gtp_jax
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.runner._exit_codes import DIVERGED, FAILED, MISTAKE, RETRY, of_error, of_signal
from gtp_jax.runner.cli import main
from gtp_jax.runner.trainer import Diverged, Launch, NoCoordinator, TrainConfig, _run
from gtp_jax.runner.trainer._interrupt import SIGNALS, Interrupt, Stopped
from gtp_jax.runner.trainer._peer_watch import PeerWatch
from gtp_jax.runner.trainer._peers import Peers

from .runs import finish, logged, small, start, wait_until, write_text
from .test_agreement import launches


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("a flag"), MISTAKE),
        (FileNotFoundError(errno.ENOENT, "no text"), MISTAKE),
        (PermissionError(errno.EACCES, "not ours"), MISTAKE),
        (OSError(errno.ENOSPC, "disk is full"), RETRY),
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


def test_statuses_are_those_of_the_page():
    page = (Path(gtp_jax.__file__).parents[1] / "docs" / "commands.md").read_text()
    for code in (0, FAILED, MISTAKE, RETRY, DIVERGED):
        assert f"\n| {code} | " in page
    assert (MISTAKE, RETRY, DIVERGED, of_signal(signal.SIGTERM)) == (2, 75, 76, 143)
    assert "143 for SIGTERM, 138 for SIGUSR1" in page


def test_full_disk_asks_for_another_try(monkeypatch, capsys):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("gtp_jax.runner.trainer._run.resolve", full)
    assert main(["train"]) == RETRY
    assert "No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_outside_the_loop_ends_python_at_once(number):
    before = signal.getsignal(number)
    with pytest.raises(Stopped, match=f"ended by {number.name}") as caught:
        with Interrupt(Launch(), PeerWatch(Launch())):
            os.kill(os.getpid(), number)
            time.sleep(5)
    assert caught.value.exit_code == 128 + number
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("place", ["read_corpus", "prepare"])
@pytest.mark.parametrize(
    ("saved", "flags", "said"),
    [
        ([], [], "Nothing was saved: the run had not begun."),
        ([], ["--resume"], "There is no checkpoint yet; start again from the beginning with: gtp-jax train --resume"),
        ([1, 3], ["--resume"], "The last checkpoint is of step 3, in "),
        ([1, 3], ["--force"], "Nothing was saved: the run had not begun."),
    ],
)
def test_a_signal_at_the_start_says_what_is_saved(tmp_path, monkeypatch, capsys, place, saved, flags, said):
    jax.devices()  # started here with its 8 devices, which the run does not change
    out = tmp_path / "run"
    settings = small(write_text(tmp_path / "text"), out, num_layers=None)
    if flags:
        out.mkdir()
        TrainConfig(out=str(out), data=(str(tmp_path / "text"),), seq=32, batch=8).save(out / "config.json")
    with Checkpoints(out / "checkpoints") if saved else contextlib.nullcontext() as checkpoints:
        for step in saved:
            checkpoints.save(step, {"w": jax.numpy.ones(2)}, extra={})
    reach = getattr(_run, place)

    def signalled(*args, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return reach(*args, **options)

    monkeypatch.setattr(_run, place, signalled)
    assert main(["train", *settings, *flags]) == 143
    assert f"gtp-jax: process 0 was ended by SIGTERM. {said}" in capsys.readouterr().err


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


@pytest.mark.parametrize(("asks", "seed"), [([0], 1), ([2], 2), ([0, 1, 2], 3), ([1, 2], 4)])
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
from gtp_jax.runner.trainer import Launch, RunDirectory
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
    [
        ("open('/dev/null')", "None", "was ended by SIGTERM: nothing else ended it within 3 s."),
        ("interrupt.loop()", "2", "was ended by SIGTERM: the state was not saved within the 2 s of --grace."),
    ],
)
def test_native_code_and_a_save_that_does_not_fit_are_ended_with_the_last_checkpoint(loop, grace, message, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(gtp_jax.__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
    TrainConfig().save(tmp_path / "config.json")
    code = _BUSY.replace("LOOP", loop).replace("GRACE", grace)
    run = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert run.stdout is not None and run.stdout.readline() == "ready\n"
    began = time.monotonic()
    run.send_signal(signal.SIGTERM)
    _, errors = run.communicate(timeout=40)
    assert run.returncode == 143 and time.monotonic() - began < 20
    assert f"gtp-jax: process 0 {message}\nThere is no checkpoint yet" in errors
    assert errors.count("There is no checkpoint yet") == 1


_COLLECTED = """
class Found:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(10**6):
            pass

with Interrupt(launch, PeerWatch(launch)):
    found = Found()
    del found
    time.sleep(30)
"""


@pytest.mark.slow
def test_a_signal_that_comes_in_a_callback_of_garbage_collection_shows_no_traceback(tmp_path):
    """Python cannot raise what a handler raises there. jax has such a callback."""
    environment = {**os.environ, "PYTHONPATH": str(Path(gtp_jax.__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
    code = _BUSY[: _BUSY.index("watch =")] + "import os, signal, time\n" + _COLLECTED
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=environment)
    assert run.returncode == 143
    assert "was ended by SIGTERM: nothing else ended it within 3 s." in run.stderr
    assert "Traceback" not in run.stderr and "ignored" not in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("after_s", [0.0, 2.0, 5.0])
def test_a_run_that_starts_is_ended_soon(number, after_s, tmp_path):
    text = write_text(tmp_path / "text")
    run = start(small(text, tmp_path / "run", steps=100_000))
    time.sleep(4 + after_s)  # Python's own handlers are there before
    run.send_signal(number)
    began = time.monotonic()
    output = finish(run)
    assert run.returncode == 128 + number, output
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_state_whose_save_does_not_fit_is_not_saved_and_the_last_checkpoint_is_named(tmp_path):
    out = tmp_path / "run"
    run = start(small(write_text(tmp_path / "text"), out, steps=100_000, eval_every=100_000, save_every=2, grace=0.001))
    wait_until(lambda: logged(out, 5), run)
    run.send_signal(signal.SIGUSR1)
    output = finish(run)
    assert run.returncode == 138, output
    latest = Checkpoints(out / "checkpoints", read_only=True).latest()
    assert latest is not None and f"The last checkpoint is of step {latest}" in output
