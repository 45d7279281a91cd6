"""Callbacks and references in layers: as in plain Flax where nothing is recomputed, otherwise refused by the layer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import io_callback
from messages import naming
from selection import pairwise

import gtp_jax as gtp

from .test_models_on_meshes import scope

WIDTH = 16
SEEN = []


def tells(x):
    io_callback(SEEN.append, None, jax.lax.stop_gradient(x.mean()))
    return x


def tells_with_gradient(x):
    io_callback(SEEN.append, None, x.mean())
    return x


def refers(x):
    mean = jax.new_ref(jnp.zeros((), x.dtype))
    mean[...] = x.mean()
    return x - mean[...]


class Layer(nnx.Module):
    def __init__(self, effect, rngs):
        self.linear, self.effect = nnx.Linear(WIDTH, WIDTH, rngs=rngs), effect

    def __call__(self, x):
        return self.effect(x + jnp.tanh(self.linear(x)))


def stacked(effect, remat):
    return gtp.init(lambda rngs: gtp.Stack(lambda rngs: Layer(effect, rngs), 2, remat=remat, rngs=rngs), nnx.Rngs(0))


def listed(effect):
    return nnx.Sequential(*[Layer(effect, nnx.Rngs(i)) for i in range(2)])


def sharded(effect, remat):
    return gtp.shard(listed(effect), Layer, min_size=64, remat=remat)


def loss(model, x):
    return jnp.mean(model(x) ** 2)


def step_of(model):
    return gtp.train_step(loss, optax.sgd(0.1)), gtp.TrainState.create(model, optax.sgd(0.1))


EFFECTS = {
    "a callback": (tells, "everything"),
    "a callback of what is differentiated": (tells_with_gradient, "jax.lax.stop_gradient"),
    "a reference": (refers, "everything"),
}


@pytest.mark.parametrize(
    "name, make, remat", pairwise(EFFECTS, {"shard": sharded, "Stack": stacked}.values(), ["matmuls", "nothing"])
)
def test_an_effect_that_would_be_repeated_is_refused_by_the_layer(name, make, remat):
    effect, remedy = EFFECTS[name]
    with scope(dict(gtp=8)):
        step, state = step_of(make(effect, remat))
        with pytest.raises((NotImplementedError, ValueError), match=naming("Layer", remedy)) as error:
            jax.eval_shape(step, state, jnp.ones((8, WIDTH)))
    assert make is stacked or "1.linear.kernel" in str(error.value) or "0.linear.kernel" in str(error.value)


@pytest.mark.parametrize("make", [sharded, pytest.param(stacked, marks=pytest.mark.full)])
def test_where_nothing_is_recomputed_it_happens_once_per_layer(make):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, WIDTH)))
    with scope(dict(gtp=8)):
        model = make(tells, "everything")
        step, state = step_of(model)
        SEEN.clear()
        jax.block_until_ready(step(state, x))
        jax.effects_barrier()
        found = sorted(map(float, SEEN))
    if make is sharded:
        SEEN.clear()
        listed(tells)(x)
        jax.effects_barrier()
        np.testing.assert_allclose(found, sorted(map(float, SEEN)), rtol=1e-5)
    assert len(found) == 2


class Referring(nnx.Module):
    """A model that writes a reference between two blocks that read it."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        factor = jax.new_ref(jnp.ones((), x.dtype))
        x = self.layers[0](x) * factor[...]
        factor[...] = 3.0
        return self.layers[1](x) * factor[...]


def test_a_reference_is_read_and_written_between_blocks_in_the_order_of_the_code():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, WIDTH)), jnp.float32)
    wanted = Referring(nnx.Rngs(0))(x)
    with scope(dict(gtp=8)):
        found = nnx.jit(lambda model, x: model(x))(gtp.shard(Referring(nnx.Rngs(0)), "layers.*", min_size=64), x)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [sharded, stacked])
def test_without_a_derivative_a_callback_happens_once_per_layer_whatever_is_recomputed(make):
    x = jnp.ones((8, WIDTH))
    with scope(dict(gtp=8)):
        model = make(tells, "matmuls")
        SEEN.clear()
        jax.block_until_ready(nnx.jit(lambda model, x: model(x))(model, x))
        jax.effects_barrier()
    assert len(SEEN) == 2
