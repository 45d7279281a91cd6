"""Loses a device: its replica continues with one GPU fewer, and the losses are those of a run without the failure.

    python examples/04_replicas_of_unequal_degree.py      # 4 GPUs, or 8 virtual CPU devices where there is no GPU

Trains 4 steps on dp 2 x tp 2, loses a device, continues from the checkpoint with replicas of tp 2 and tp 1, gets the
device back, and prints the losses, followed by those of one device that trained on the same batches.
"""

import tempfile

import jax
import numpy as np
import optax
from flax import nnx

import gtp_jax as gtp
from gtp_jax.models import Llama, LlamaConfig, next_token_loss

jax.config.update("jax_num_cpu_devices", 8)  # where there is no GPU

BATCH = 12
CONFIG = LlamaConfig(
    vocab_size=101,
    hidden_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
    intermediate_size=102,
    dtype="float32",
)
OPTIMIZER = optax.adamw(3e-3)


def factory(rngs: nnx.Rngs) -> Llama:
    return Llama(CONFIG, rngs=rngs)


def batch(number: int) -> dict[str, np.ndarray]:
    tokens = np.cumsum(np.random.default_rng(number).integers(0, 3, (BATCH, 33)), axis=1, dtype=np.int32) % 101
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def train(replicas: gtp.nonuniform.Replicas, steps: range, folder: str) -> None:
    """Trains from the latest checkpoint, if there is one, and saves the state."""
    with jax.set_mesh(replicas.core), gtp.Checkpoints(folder) as checkpoints:
        state = gtp.TrainState.create(gtp.init(factory, nnx.Rngs(0)), OPTIMIZER)
        if checkpoints.latest() is not None:
            state, _ = checkpoints.restore(state)
        step = gtp.train_step(next_token_loss, OPTIMIZER, view="local", replicas=replicas)
        degrees = " and ".join(str(replica.tp) for replica in replicas.plan.replicas)
        for number in steps:
            state, metrics = step(state, batch(number))
            print(f"step {number}: loss {float(metrics['loss']):.6f}, replicas at tp {degrees}")
        checkpoints.save(steps.stop, state)


devices = jax.devices()[:4]
healthy = gtp.nonuniform.Replicas(factory, gtp.nonuniform.plan_faults(dp=2, tp=2, batch=BATCH), devices)
hurt = gtp.nonuniform.Replicas(factory, gtp.nonuniform.plan_faults(dp=2, tp=2, failed=[3], batch=BATCH), devices)
with tempfile.TemporaryDirectory() as folder:
    train(healthy, range(4), folder)
    print("device 3 fails")
    train(hurt, range(4, 8), folder)
    print("device 3 is back")
    train(healthy, range(8, 12), folder)

with jax.set_mesh(gtp.make_mesh(devices=devices[:1])):
    state = gtp.TrainState.create(gtp.init(factory, nnx.Rngs(0)), OPTIMIZER)
    step = gtp.train_step(next_token_loss, OPTIMIZER, view="local")
    for number in range(12):
        state, metrics = step(state, batch(number))
        print(f"step {number}: loss {float(metrics['loss']):.6f} on one device")
