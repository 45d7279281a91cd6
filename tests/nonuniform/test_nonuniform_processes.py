"""Several processes: replicas of unequal degree train as in one process, and the state is saved and restored."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gtp_jax as gtp

from .test_nonuniform_step import train
from .unequal import Tiny, adapted_codes, batches, loss

ROOT = Path(__file__).parents[2]

WORKER = """
import sys
import jax
jax.config.update("jax_enable_x64", True)
address, count, rank, devices, name, folder, dp, gtp_degree, tp, batch, *failed = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", int(devices))
jax.distributed.initialize(address, int(count), int(rank))
from flax import nnx
import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints
from tests.nonuniform import unequal
from tests.nonuniform.unequal import OPTIMIZER, batches, loss

degrees = dict(dp=int(dp), gtp=int(gtp_degree), tp=int(tp))
plan = gtp.nonuniform.plan_faults(**degrees, failed=tuple(map(int, failed)), batch=int(batch))
model = getattr(unequal, name)
replicas = gtp.nonuniform.Replicas(model, plan)
with jax.set_mesh(replicas.core), Checkpoints(folder) as checkpoints:
    state = gtp.TrainState.create(gtp.init(model, nnx.Rngs(3)), OPTIMIZER)
    step = gtp.train_step(loss, OPTIMIZER, view="local", max_grad_norm=0.5, replicas=replicas)
    data = list(batches(plan.batch))
    for number, part in enumerate(data[:4]):
        state, metrics = step(state, part)
        print("loss", repr(float(metrics["loss"])), repr(float(metrics["grad_norm"])), flush=True)
        if number in (1, 2):
            checkpoints.save(number + 1, state, {"order": [1]})
    checkpoints.wait()
    state, extra = checkpoints.restore(state)
    state, metrics = step(state, data[3])
    print("loss", repr(float(metrics["loss"])), repr(float(metrics["grad_norm"])), extra, flush=True)
jax.distributed.shutdown()
"""

# Degrees of a plan, and the devices of each process; by default one each.
PLANS = {
    "2 and 1, where one process has no part of the state": (dict(dp=2, gtp=1, tp=2, failed=(3,), batch=9), ()),
    "gtp 2, tp 2 and 1": (dict(dp=2, gtp=2, tp=2, failed=(4, 6), batch=12), (2, 2, 1, 1)),
    "2 and 1, a process per replica": (dict(dp=2, gtp=1, tp=2, failed=(3,), batch=9), (2, 1)),
    "2 and 1, adapters on codes": (dict(dp=2, gtp=1, tp=2, failed=(3,), batch=9), ()),
}


@functools.cache
def on_one_device(model, rows):
    return train(model, loss, list(batches(rows))[:4])


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_several_processes_equal_one(name, x64, tmp_path):
    degrees, hosts = PLANS[name]
    model = adapted_codes if "adapters" in name else Tiny
    plan = gtp.nonuniform.plan_faults(**degrees)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    sizes = [degrees[key] for key in ("dp", "gtp", "tp", "batch")]
    arguments = [model.__name__, str(tmp_path / "run"), *map(str, sizes), *map(str, degrees["failed"])]
    hosts = hosts or (1,) * len(plan.active)
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, address, str(len(hosts)), str(rank), str(devices), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, devices in enumerate(hosts)
    ]
    try:
        outputs = [worker.communicate(timeout=300) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    wanted = on_one_device(model, plan.batch)
    for worker, (out, error) in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, error[-3000:]
        lines = [line.split() for line in out.splitlines() if line.startswith("loss")]
        found = np.array([[float(one), float(norm)] for _, one, norm, *_ in lines])
        expected = np.array([*zip(wanted["losses"], wanted["norms"], strict=True)])
        np.testing.assert_allclose(found, expected[[0, 1, 2, 3, 3]], rtol=1e-11)
        assert lines[-1][3:] == ["{'order':", "[1]}"]
