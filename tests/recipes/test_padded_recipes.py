"""Of weights that are stored padded, recipes send and multiply the codes of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gtp_jax as gtp


class Model(nnx.Module):
    """At gtp 7, the rows of `narrow`, which share a gather, are padded, and the columns of `wide`; tiles are cut."""

    def __init__(self, rngs):
        options = dict(dtype=jnp.float64, param_dtype=jnp.float64, rngs=rngs)
        self.narrow = gtp.Dense(33, {"a": 160, "b": 66}, **options)
        self.wide = gtp.Dense(160, 66, **options)

    def __call__(self, x):
        made = self.narrow(x)
        return self.wide(made["a"]) + made["b"]


def loss(model, x):
    return jnp.sum(jnp.sin(model(x))), jnp.float64(x.size)


# a recipe, and how much the gradient may differ: each rank rounds its own tokens where operands are quantized
RECIPES = {
    "FP8": (gtp.FP8(), 1e-15),
    "MXFP8": (gtp.MXFP8(), 1e-15),
    "NVFP4": (gtp.NVFP4(), 1e-15),
    "FP8 in blocks": (gtp.FP8Blocks(exclude=()), 1e-7),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_with_padded_weights_is_that_of_one_device(name, x64):
    recipe, atol = RECIPES[name]
    found = []
    for degree in (1, 7):
        with jax.set_mesh(gtp.make_mesh(gtp=degree, devices=jax.devices()[:degree])), gtp.even_shares():
            state = gtp.TrainState.create(gtp.init(Model, nnx.Rngs(0)), optax.sgd(1.0))
            stored = {path[0]: layout.array_shape for path, layout in state.model_def.padded.items()}
            step = gtp.train_step(loss, optax.sgd(1.0), recipe=recipe)
            state, metrics = step(state, jnp.asarray(np.random.default_rng(0).normal(size=(7, 5, 33))))
            found.append((float(metrics["loss"]), jax.tree.map(np.asarray, state.logical().params)))
    assert stored == {"narrow": (33, 70), "wide": (161, 66)}
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-14, abs=0), "codes are those of one device"
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), found[1][1], found[0][1])
