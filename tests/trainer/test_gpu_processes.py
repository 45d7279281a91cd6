"""One process a GPU, joined by NCCL: trains as one process of all GPUs does, and outlives no peer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from gtp_jax.checkpoint import Checkpoints

from .runs import processes, read_records, small, train, wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs")]


def test_a_process_a_gpu_equals_one_process_but_for_the_order_of_sums(text, tmp_path):
    count = jax.device_count()
    flags = dict(steps=6, lr=1e-3, gtp=count)
    train(small(text, tmp_path / "one", **flags), gpus=",".join(map(str, range(count))))
    with processes(count, small(text, tmp_path / "many", **flags), tmp_path, gpu_each=True) as runs:
        assert [run.wait(120) for run in runs] == [0] * count, (tmp_path / "process0.txt").read_text()[-3000:]
    one, many = read_records(tmp_path / "one"), read_records(tmp_path / "many")
    assert [sorted(r) for r in one] == [sorted(r) for r in many]
    for found, expected in zip(many, one, strict=True):
        for name in expected:  # bf16 all the way
            np.testing.assert_allclose(found[name], expected[name], rtol=3e-2, err_msg=f"{name} of {expected}")


def committed(out):
    """The step of the latest checkpoint; `None` before the first."""
    return Checkpoints(out / "checkpoints", read_only=True).latest() if (out / "checkpoints").exists() else None


@pytest.mark.parametrize("victim", [0, 1])
def test_a_dead_peer_under_nccl_ends_the_run_with_the_last_checkpoint(victim, text, tmp_path):
    out = tmp_path / "run"
    flags = small(text, out, gtp=2, steps=1_000_000, eval_every=1_000_000, save_every=50)
    with processes(2, flags, tmp_path, gpu_each=True) as runs:
        wait_until(lambda: committed(out) is not None, runs[victim])
        runs[victim].send_signal(signal.SIGKILL)
        assert runs[1 - victim].wait(60) not in (0, None)
        time.sleep(5)  # the last word may come from the guard, which outlives the process
    latest = committed(out)
    output = (tmp_path / f"process{1 - victim}.txt").read_text()
    assert f"gtp-jax: process {1 - victim} cannot go on: " in output, output[-3000:]
    assert f"The last checkpoint is of step {latest}" in output


_OTHER_WORK = """
import jax, jax.numpy as jnp
x = jnp.full((8192, 8192), 1 / 8192, jnp.bfloat16)
work = jax.jit(lambda x: jax.lax.fori_loop(0, 100, lambda _, y: y @ x, x))
while True:
    work(x).block_until_ready()
"""


def test_only_the_device_that_is_slow_is_named(text, tmp_path):
    flags = small(text, tmp_path / "run", gtp=2, steps=1_000_000, eval_every=10, save_every=1_000_000)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    other = subprocess.Popen([sys.executable, "-c", _OTHER_WORK], env=environment)
    try:
        with processes(2, flags, tmp_path, gpu_each=True) as runs:
            wait_until(lambda: "slow: " in (tmp_path / "process0.txt").read_text(), runs[0])
            time.sleep(10)  # another would be named by then
            said = [line for line in (tmp_path / "process0.txt").read_text().splitlines() if "slow: " in line]
    finally:
        other.kill()
        other.wait()
    assert all("slow: process 1: device " in line for line in said), said
