"""Plain values after the activation, `None` among them, reach every layer of a stack or chain, in each view."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming
from placed import placed
from selection import others_full

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


X = np.random.default_rng(0).normal(size=(8, 4, WIDTH))


@pytest.mark.parametrize("mesh", others_full([None, dict(gtp=8), dict(gtp=4, tp=2)], [dict(gtp=4, tp=2)]), ids=str)
def test_they_reach_every_layer_of_a_stack(mesh, x64):
    with scope(mesh):
        graph, state = nnx.split(placed(stacked))

        @jax.jit
        def run(state, x):
            model = nnx.merge(graph, state)
            each = {
                name: (model(x, *args, **kwargs), gtp.nn.run_chain(x, model, shared=kwargs or args))
                for name, ((args, kwargs), *_) in INPUTS.items()
            }
            return model(x, None), each

        bare, each = jax.tree.map(np.asarray, run(state, X))
    for name, (_, scale, count) in INPUTS.items():
        for found in each[name]:
            np.testing.assert_allclose(found, bare * (scale * count) ** LAYERS, rtol=1e-12, err_msg=name)


@pytest.mark.parametrize("view", others_full(["local", "global"], ["local"]))
def test_they_reach_every_layer_in_a_step(view, x64):
    with scope(dict(gtp=8)):
        state = gtp.TrainState.create(placed(stacked), optax.identity())

        @jax.jit
        def values(state, x):
            def value(*args):
                loss = lambda model, x: (jnp.sum(model(x, *args) ** 2), jnp.float64(1))  # noqa: E731
                return gtp.train.loss_and_gradients(loss, state, x, view=view)[0]

            return value(), value(None)

        scaled, bare = values(state, X)
    np.testing.assert_allclose(scaled, bare * 2.0 ** (2 * LAYERS), rtol=1e-12)


def test_a_chain_without_stacks_refuses_them_even_if_they_are_none():
    dense = gtp.Dense(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=naming("`shared` `Stack` `run_chain`")):
        gtp.nn.run_chain(X, dense, shared=(None,))
