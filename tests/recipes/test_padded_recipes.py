"""Of weights that are stored padded, recipes send and multiply the codes of one device."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from selection import pairwise

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


class Wide(nnx.Module):
    """Where 2 ranks of gtp divide all dimensions, and 3 of dp none, whole blocks fill what each rank stores."""

    def __init__(self, rngs):
        options = dict(dtype=jnp.float64, param_dtype=jnp.float64, rngs=rngs)
        self.up = gtp.Dense(64, 1616, **options)
        self.down = gtp.Dense(1616, 64, **options)

    def __call__(self, x):
        return self.down(self.up(x))


def loss(model, x):
    return jnp.sum(jnp.sin(model(x))), jnp.float64(x.size)


# a recipe, and how much the gradient may differ: each rank rounds its own tokens where operands are quantized
RECIPES = {
    "NVFP4": (gtp.NVFP4(), 1e-15),
    "FP8": (gtp.FP8(), 1e-15),
    "MXFP8": (gtp.MXFP8(), 1e-15),
    "FP8 in blocks": (gtp.recipes.FP8Blocks(exclude=()), 1e-7),
}


CASES = {
    "gtp 7": (Model, 33, dict(gtp=7), {"narrow": (33, 70), "wide": (161, 66)}),
    "gtp 2 x dp 4": (Model, 33, dict(gtp=2, dp=4), {"narrow": (33, 72)}),
    "gtp 2 x dp 3, whole blocks": (Wide, 64, dict(gtp=2, dp=3), {"up": (64, 1632), "down": (1632, 64)}),
    "dp 3, whole blocks": (Wide, 64, dict(dp=3), {"up": (64, 1632), "down": (1632, 64)}),
}


@pytest.mark.parametrize(("case", "name"), pairwise(CASES, RECIPES, usual=1))
def test_a_step_with_padded_weights_is_that_of_one_device(case, name, x64):
    (recipe, atol), (model, width, degrees, shapes) = RECIPES[name], CASES[case]
    found = []
    x = jnp.asarray(np.random.default_rng(0).normal(size=(168, 2, width)))
    for sizes in ({}, degrees):
        devices = jax.devices()[: math.prod(sizes.values())]
        with jax.set_mesh(gtp.make_mesh(**{"gtp": 1, **sizes}, devices=devices)), gtp.layout.even_shares():
            state = gtp.TrainState.create(gtp.init(model, nnx.Rngs(0)), optax.sgd(1.0))
            stored = {path[0]: layout.array_shape for path, layout in state.model_def.padded.items()}
            step = gtp.train_step(loss, optax.sgd(1.0), recipe=recipe)
            state, metrics = step(state, x)
            found.append((float(metrics["loss"]), jax.tree.map(np.asarray, state.logical().params)))
    assert stored == shapes
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-14, abs=1e-15), "codes are those of one device"
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), found[1][1], found[0][1])
