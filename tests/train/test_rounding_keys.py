"""Steps, microbatches and ranks that compute the same round stochastically by bits of their own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gtp_jax as gtp

WIDTH, LENGTH = 64, 32
# an example, repeated for every microbatch and rank: a mean is that of one, if they round alike
EXAMPLE = np.random.default_rng(0).normal(size=(1, LENGTH, WIDTH)).astype(np.float32)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.dense = gtp.Dense(WIDTH, WIDTH, dtype="float32", rngs=rngs)

    def __call__(self, x):
        return self.dense(x)


def loss(model, x):
    return jnp.sum(jnp.sin(model(x))), jnp.float32(x.shape[0])


@functools.cache
def gradient(*, microbatches=1, ranks=1, step=0, seed=0, view="local"):
    with jax.set_mesh(gtp.make_mesh(gtp=ranks, devices=jax.devices()[:ranks])):
        state = gtp.TrainState.create(gtp.init(lambda rngs: Model(rngs), nnx.Rngs(0)), optax.identity())
        state = dataclasses.replace(state, step=jnp.int32(step))
        options = dict(recipe=gtp.NVFP4(matmuls=True), microbatches=microbatches, view=view, seed=seed)
        run = jax.jit(lambda state, x: gtp.train.loss_and_gradients(loss, state, x, **options))
        return np.asarray(run(state, jnp.asarray(np.repeat(EXAMPLE, microbatches * ranks, 0)))[1]["dense"]["kernel"])


OTHERS = {"microbatches": dict(microbatches=2), "ranks": dict(ranks=2), "steps": dict(step=1), "seeds": dict(seed=1)}


@pytest.mark.parametrize("view", ["local", pytest.param("global", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OTHERS)
def test_what_computes_the_same_is_rounded_by_bits_of_its_own(name, view):
    once, other = gradient(view=view), gradient(view=view, **OTHERS[name])
    difference = np.linalg.norm(other - once) / np.linalg.norm(once)
    assert 0.02 < difference < 0.5


class Pair(nnx.Module):
    """Two layers with the same weights and the same input."""

    def __init__(self, rngs):
        self.one, self.other = (gtp.Dense(WIDTH, WIDTH, dtype="float32", rngs=nnx.Rngs(1)) for _ in range(2))

    def __call__(self, x):
        return jnp.stack([self.one(x), self.other(x)])


def test_modules_that_compute_the_same_round_by_bits_of_their_own():
    state = gtp.TrainState.create(gtp.init(lambda rngs: Pair(rngs), nnx.Rngs(0)), optax.identity())
    for stochastic in (True, False):
        recipe = gtp.NVFP4(matmuls=True, stochastic=stochastic)
        run = jax.jit(lambda state, x, r=recipe: gtp.train.loss_and_gradients(loss, state, x, recipe=r, view="local"))
        found = run(state, jnp.asarray(EXAMPLE))[1]
        one, other = (np.asarray(found[name]["kernel"]) for name in ("one", "other"))
        difference = np.linalg.norm(other - one) / np.linalg.norm(one)
        assert 0.02 < difference < 0.5 if stochastic else difference == 0
