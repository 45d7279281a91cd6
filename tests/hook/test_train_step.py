"""Sharded models with gtp_jax's own `train_step`, `check`, checkpoints and `explain`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.nn import abstract_model

from .models import GPT2, Brief, tokens
from .steps import MESHES, scope

OPTIMIZER = optax.adamw(1e-2, eps=1e-3)


def make(rngs):
    return GPT2(rngs, depth=2, block=Brief)


def sharded(rngs):
    return gtp.shard(make(rngs), min_size=64)


def loss(model, batch):
    return gtp.cross_entropy(model(batch["tokens"]), jnp.roll(batch["tokens"], 1, axis=1))


def batch():
    return {"tokens": tokens()}


def rngs():
    return nnx.Rngs(0, dropout=1)


def trained(factory, degrees, steps=2, **options):
    """Returns metrics of some steps, the state, and its parameters."""
    with scope(degrees):
        state = gtp.TrainState.create(gtp.init(factory, rngs()), OPTIMIZER)
        step = gtp.train_step(loss, OPTIMIZER, **options)
        found = []
        for _ in range(steps):
            state, metrics = step(state, batch())
            found.append([float(metrics["loss"]), float(metrics["grad_norm"])])
        return np.asarray(found), state, jax.tree.map(np.asarray, state.params)


def assert_close(found, wanted):
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-11)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-9), found[2], wanted[2])


@pytest.mark.filterwarnings("ignore:no mesh is in scope")
def test_steps_with_microbatches_are_those_without_a_mesh_and_are_saved_and_restored(tmp_path, x64):
    wanted = trained(make, None, microbatches=2)
    found = trained(sharded, MESHES["dp 2, gtp 4"], microbatches=2)
    assert_close(found, wanted)
    table = found[1].opt_state[0].mu["embed"]["embedding"]
    assert table.addressable_shards[0].data.size == table.size // 8
    with scope(MESHES["dp 2, gtp 4"]), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, found[1])
    with scope(MESHES["gtp 8"]), Checkpoints(tmp_path) as checkpoints:
        model = abstract_model(lambda _: sharded(rngs()))
        state, _ = checkpoints.restore(gtp.TrainState.create(model, OPTIMIZER))
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state.params), found[2])
        metrics = gtp.eval_step(loss)(state, batch())
        assert np.isfinite(metrics["loss"])
