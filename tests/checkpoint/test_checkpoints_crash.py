"""Killed at any moment of a save, or out of room, a run loses nothing that was committed."""

import contextlib
import errno
import multiprocessing
import os
import random
import re
import resource
import runpy
import secrets
import shutil
import signal
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest
from messages import naming

from gtp_jax.checkpoint import Checkpoints
from gtp_jax.runner._exit_codes import RETRY, of_error

SAVE_FOREVER = """
import itertools
import jax.numpy as jnp
import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.nn import ModelDef

log = open(directory + ".log", "a", buffering=1)
with Checkpoints(directory, keep=2) as checkpoints:
    for step in itertools.count(1):
        params = {f"w{i}": jnp.full((256, 1024), step * 100 + i, jnp.float32) for i in range(8)}
        state = gtp.TrainState(params, (), jnp.int32(step), ModelDef(None, None, {}, {}))
        checkpoints.save(step, state, {"step": step})
        checkpoints.wait()
        print(step, file=log)
"""


@pytest.fixture(scope="module")
def start_saving(tmp_path_factory):
    """`start_saving(directory)`: a process that saves until it is killed, forked from one that has imported all."""
    script = tmp_path_factory.mktemp("script") / "save_forever.py"
    script.write_text(SAVE_FOREVER)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gtp_jax", "gtp_jax.checkpoint", "gtp_jax.nn"])

    def start(directory):
        arguments = (str(script), {"directory": str(directory)})
        process = context.Process(target=runpy.run_path, args=arguments, daemon=True)
        process.start()
        return process

    return start


def committed(directory) -> list[int]:
    log = directory.with_name(directory.name + ".log")
    return [int(step) for step in re.findall(r"(\d+)\n", log.read_text())] if log.exists() else []


@pytest.mark.parametrize("kills", [pytest.param(6, marks=pytest.mark.full), pytest.param(100, marks=pytest.mark.slow)])
def test_a_killed_run_leaves_its_last_committed_step(tmp_path, plain, start_saving, kills):
    seed = secrets.randbits(31)
    rng = random.Random(seed)
    like = plain({f"w{i}": jnp.zeros((256, 1024)) for i in range(8)})
    half_written = 0
    for trial in range(kills):
        directory = tmp_path / f"run{trial}"
        process = start_saving(directory)
        deadline = time.monotonic() + 120
        while not committed(directory):
            assert process.is_alive() and time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.6))  # one to several saves
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        half_written += any("tmp" in entry for entry in os.listdir(directory))
        with Checkpoints(directory, keep=2) as checkpoints:
            latest = checkpoints.latest()
            assert latest is not None and latest >= max(committed(directory)), (seed, trial)
            for step in checkpoints.steps():
                assert checkpoints.verify(step) == [], (seed, trial)
                restored, extra = checkpoints.restore(like, step)
                assert extra == {"step": step} and restored.step == step, (seed, trial)
                for i in range(8):
                    assert np.all(np.asarray(restored.params[f"w{i}"]) == step * 100 + i), (seed, trial)
            checkpoints.save(latest + 1, restored)
        assert sorted(map(int, os.listdir(directory))) == [latest, latest + 1], (seed, trial, os.listdir(directory))
        shutil.rmtree(directory)
    assert half_written, "no run was killed in the middle of a save"


KEEP_ONE = """
import os, shutil
import jax.numpy as jnp
import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.nn import ModelDef

delete = shutil.rmtree

def killed_halfway(path):
    delete(f"{path}/arrays")
    os.kill(os.getpid(), 9)

shutil.rmtree = killed_halfway
with Checkpoints(directory, keep=1) as checkpoints:
    for step in (1, 2):
        state = gtp.TrainState({"w": jnp.full(3, step)}, (), jnp.int32(step), ModelDef(None, None, {}, {}))
        checkpoints.save(step, state, loss=float(step))
"""


def test_a_step_that_is_half_deleted_is_no_step_and_is_swept(tmp_path, plain):
    directory = tmp_path / "run"
    killed = subprocess.run([sys.executable, "-c", f"directory = {str(directory)!r}\n{KEEP_ONE}"])
    assert killed.returncode == -signal.SIGKILL
    assert len(os.listdir(directory)) == 2, "nothing was left of the step that was deleted"
    with Checkpoints(directory, keep=3, keep_best=1) as checkpoints:
        assert checkpoints.steps() == [2] and checkpoints.best() == 2
        restored, _ = checkpoints.restore(plain({"w": jnp.zeros(3, int)}))
        assert (restored.params["w"] == 2).all()
        checkpoints.save(3, restored, loss=3.0)
        checkpoints.wait()
        assert sorted(os.listdir(directory)) == ["2", "3"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 12 MiB."""
    where = tmp_path / "disk"
    where.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", where], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"only root may mount a file system: {mounted.stderr.decode().strip()}")
    yield where
    subprocess.run(["umount", "--lazy", where], check=False)


@contextlib.contextmanager
def short_files(_):
    """Allows no file of more than 4 MiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def read_only(disk):
    """Makes a file system read-only, as a kernel does after errors of the disk."""
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)


@pytest.mark.parametrize(
    ("rows", "broken", "number", "said"),
    [
        (8192, contextlib.nullcontext, errno.ENOSPC, "space `keep`"),
        (1536, short_files, errno.EFBIG, "large (`ulimit -f`)"),
        (512, read_only, errno.EROFS, "Read-only writable"),
    ],
    ids=["full", "a limit of sizes", "read-only"],
)
def test_a_disk_that_refuses_is_an_error_that_says_so_without_a_wait_and_loses_nothing(
    small_disk, plain, rows, broken, number, said
):
    def state(step, rows):  # of 4 KiB each
        values = np.random.default_rng(step).normal(size=(rows, 1024)).astype(np.float32)
        return plain({"w": jnp.asarray(values)})

    checkpoints = Checkpoints(small_disk / "run")
    checkpoints.check_save()  # nothing has been saved
    checkpoints.save(1, state(1, 512))
    checkpoints.wait()
    checkpoints.check_save()
    with broken(small_disk), pytest.raises(OSError, match=naming("/run [1]", said)) as caught:
        checkpoints.save(2, state(2, rows))
        for _ in range(1000):  # the training steps that follow
            checkpoints.check_save()
            time.sleep(0.05)
    assert caught.value.errno == number and of_error(caught.value) == RETRY
    restored, _ = checkpoints.restore(state(0, 512))
    assert (np.asarray(restored.params["w"]) == np.asarray(state(1, 512).params["w"])).all()
    assert checkpoints.verify(1) == []
    checkpoints.save(3, restored)
    checkpoints.wait()
    assert sorted(os.listdir(small_disk / "run")) == ["1", "3"], "what the failed save left was not removed"
