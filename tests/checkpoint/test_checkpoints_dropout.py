"""A model with dropout is saved on one mesh and goes on on another, restored by the shapes of `abstract_model`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.nn import abstract_model

OPTIMIZER = optax.adamw(1e-2)


class Dropped(nnx.Module):
    def __init__(self, rngs):
        shared = dict(dtype="float64", param_dtype="float64", rngs=rngs)
        self.up = gtp.Dense(8, 16, **shared)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.down = gtp.Dense(16, 8, **shared)

    def __call__(self, x):
        return self.down(self.dropout(self.up(x)))


def loss(model, batch):
    return jnp.mean((model(batch) - batch) ** 2)


def batches():
    rng = np.random.default_rng(0)
    return [rng.normal(size=(4, 2, 8)) for _ in range(4)]


def losses(state, data):
    step, found = gtp.train_step(loss, OPTIMIZER), []
    for batch in data:
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return state, found


def mesh(**degrees):
    return gtp.make_mesh(**degrees, devices=jax.devices()[:2])


@pytest.mark.parametrize("impl", ["threefry2x32", pytest.param("rbg", marks=pytest.mark.full)])
def test_a_model_with_dropout_restored_through_its_shapes_goes_on_as_if_never_stopped(impl, x64, tmp_path):
    with jax.default_prng_impl(impl), Checkpoints(tmp_path) as checkpoints:
        with jax.set_mesh(mesh(gtp=2)):
            state, _ = losses(gtp.TrainState.create(gtp.init(Dropped, nnx.Rngs(0)), OPTIMIZER), batches()[:2])
            checkpoints.save(2, state)
            _, wanted = losses(state, batches()[2:])
        with jax.set_mesh(mesh(tp=2)):
            like = gtp.TrainState.create(abstract_model(Dropped), OPTIMIZER)
            assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(like))
            state, _ = checkpoints.restore(like)
            assert int(state.model_state["dropout"]["rngs"]["count"]) == 2
            _, found = losses(state, batches()[2:])
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
