"""Plain values after the activation, `None` among them, reach every layer of a stack or chain, in each view."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gtp_jax as gtp

from .test_models_on_meshes import scope

WIDTH, LAYERS = 8, 2


class Scaled(gtp.nn.Layer):
    """A layer whose arguments after the activation have defaults other than `None`."""

    def __init__(self, rngs):
        super().__init__()
        self.dense = gtp.Dense(WIDTH, WIDTH, dtype="float64", param_dtype="float64", rngs=rngs)

    def local(self, x, scale=2.0, sizes=(3.0,)):
        y = self.dense(x) if scale is None else self.dense(x) * scale
        return y * len(sizes)


def stacked(rngs):
    return gtp.Stack(Scaled, LAYERS, rngs=rngs)


INPUTS = {
    "none": (((), {}), 2.0, 1),
    "None": (((None,), {}), 1.0, 1),
    "None by name": (((), {"scale": None}), 1.0, 1),
    "an empty list": (((), {"sizes": []}), 2.0, 0),
    "a number": (((3.0, (1, 2)), {}), 3.0, 2),
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("mesh", [None, dict(gtp=8), dict(gtp=4, tp=2)], ids=str)
def test_they_reach_every_layer_of_a_stack(mesh, name, x64):
    (args, kwargs), scale, count = INPUTS[name]
    x = jax.random.normal(jax.random.key(0), (8, 4, WIDTH), jnp.float64)
    with scope(mesh):
        model = gtp.init(stacked, nnx.Rngs(0))
        found = np.asarray(jax.jit(lambda x: model(x, *args, **kwargs))(x))
        ones = gtp.run_chain(x, model, shared=kwargs or args)
        bare = np.asarray(model(x, None))
    np.testing.assert_allclose(found, bare * (scale * count) ** LAYERS, rtol=1e-12)
    np.testing.assert_allclose(ones, found, rtol=1e-12)


@pytest.mark.parametrize("view", ["global", "local"])
def test_they_reach_every_layer_in_a_step(view, x64):
    x = jax.random.normal(jax.random.key(0), (8, 4, WIDTH), jnp.float64)

    def value(*args):
        state = gtp.TrainState.create(gtp.init(stacked, nnx.Rngs(0)), optax.identity())
        loss = lambda model, x: (jnp.sum(model(x, *args) ** 2), jnp.float64(1))  # noqa: E731
        return float(gtp.loss_and_gradients(loss, state, x, view=view)[0])

    with scope(dict(gtp=8)):
        np.testing.assert_allclose(value(), value(None) * 2.0 ** (2 * LAYERS), rtol=1e-12)


def test_a_chain_without_stacks_refuses_them_even_if_they_are_none():
    dense = gtp.Dense(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="`shared` applies to the layers of a `Stack`, but `run_chain` got no stack"):
        gtp.run_chain(jnp.ones((8, 4, WIDTH)), dense, shared=(None,))
