"""Flax's modules that set the parameters of a layer: right where what they set stays, refused in a step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming

import gtp_jax as gtp

from .test_models_on_meshes import scope

WIDTH = 16
KINDS = [nnx.WeightNorm, pytest.param(nnx.SpectralNorm, marks=pytest.mark.full)]


class Model(nnx.Module):
    def __init__(self, kind, rngs):
        self.layer = gtp.Dense(WIDTH, WIDTH, dtype="float64", param_dtype="float64", rngs=rngs)
        # scales are bare arrays in flax 0.12.10, which a merge of its own loses
        options = {"use_scale": False} if kind is nnx.WeightNorm else {}
        self.normed = kind(self.layer, param_dtype=jnp.float64, rngs=rngs, **options)

    def __call__(self, x):
        options = {"update_stats": True} if isinstance(self.normed, nnx.SpectralNorm) else {}
        return self.normed(x, **options)


@nnx.jit
def step(model, optimizer, x):
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean(jnp.sin(3 * model(x))))(model)
    optimizer.update(model, gradients)
    return loss


@pytest.mark.parametrize("kind", KINDS)
def test_under_nnx_jit_they_are_what_they_are_without_a_mesh(kind, x64):
    x, found = np.random.default_rng(0).normal(size=(8, 4, WIDTH)), []
    for degrees in (None, dict(gtp=4, tp=2)):
        with scope(degrees):
            model = gtp.init(lambda rngs: Model(kind, rngs), nnx.Rngs(0))
            optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
            found.append([float(step(model, optimizer, x)) for _ in range(3)])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_which_would_drop_what_they_set_refuses_them(kind, x64):
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        model = gtp.init(lambda rngs: Model(kind, rngs), nnx.Rngs(0))
        expected = naming(f"normed `nnx.{kind.__name__}` lost `nnx.Optimizer`")
        with pytest.raises(ValueError, match=expected):
            gtp.TrainState.create(model, optax.sgd(0.1))
