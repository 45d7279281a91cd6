"""A parameter with a rule of its own is moved by the rule, and by nothing else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gtp_jax as gtp
from gtp_jax.nn import set_update_rule


@dataclasses.dataclass(frozen=True)
class Follow:
    """Adds its gradient, times a rate."""

    rate: float

    def moved(self, value, gradient):
        return value + self.rate * gradient

    def metrics(self, gradients):
        return {"followed": jnp.stack([jnp.sum(g) for g in gradients]).sum()}


class Model(nnx.Module):
    def __init__(self, rngs):
        self.dense = gtp.Dense(8, 8, dtype=jnp.float32, rngs=rngs)
        self.first, self.second = nnx.Param(jnp.ones(8)), nnx.Param(jnp.ones(8))
        set_update_rule(self.first, Follow(0.5))
        set_update_rule(self.second, Follow(0.25))

    def __call__(self, x):
        return self.dense(x) * self.first + x * self.second


def loss(model, x):
    return jnp.mean(model(x))


@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_rule_moves_its_parameters_by_the_mean_gradient_once_a_step(microbatches):
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    with jax.set_mesh(gtp.make_mesh(gtp=4, devices=jax.devices()[:4])):
        optimizer = optax.adamw(1e-2, weight_decay=0.5)  # neither of which touches them
        state = gtp.TrainState.create(gtp.init(Model, nnx.Rngs(0)), optimizer)
        step = gtp.train_step(loss, optimizer, microbatches=microbatches, max_grad_norm=1e-3)
        kernel = np.asarray(state.params["dense"]["kernel"])
        of_first, of_second = (x @ kernel).mean(0) / 8, x.mean(0) / 8
        state, metrics = step(state, x)
        np.testing.assert_allclose(state.params["first"], 1 + 0.5 * of_first, rtol=1e-5)
        np.testing.assert_allclose(state.params["second"], 1 + 0.25 * of_second, rtol=1e-5)
        np.testing.assert_allclose(metrics["followed"], of_first.sum() + of_second.sum(), rtol=1e-4, atol=1e-6)
        of_kernel = x.mean(0) / 8  # the gradient of every column, whose factor is 1
        np.testing.assert_allclose(metrics["grad_norm"], np.sqrt(8 * np.sum(of_kernel**2)), rtol=1e-4)
        before = np.asarray(state.params["first"])
        state, metrics = step(state, np.full_like(x, np.nan))
        assert metrics["skipped"]
        np.testing.assert_array_equal(state.params["first"], before)
