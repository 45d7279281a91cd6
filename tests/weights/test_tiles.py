"""Weights in tiles that shards may cut: codes are those of one device, one maximum is reduced, and codes travel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from placed import placed
from selection import others_full

import gtp_jax as gtp
from gtp_jax import hlo

from ..ops import oracle

WIDTH = 192
# sizes of kernels that share a gather; degrees; the layer's parallelism
PLACES = {
    "whole tiles": ((256,), dict(gtp=2), {}),
    "half a tile": ((256,), dict(gtp=4), {}),
    "columns": ((7,), dict(gtp=4), {}),
    "columns of kernels of whole tiles": ((128, 256), dict(gtp=3), {}),
    "kernels of whole tiles": ((256, 512), dict(gtp=2), {}),
    "kernels cut": ((256, 64, 32), dict(gtp=8), {}),
    "kernels of odd sizes": ((200, 72), dict(gtp=4), {}),
    "parts of dp": ((256, 64), dict(gtp=2, dp=4), {}),
    "parallel by column": ((512, 256), dict(gtp=4, tp=2), dict(parallel="column")),
}


def scope(degrees):
    return jax.set_mesh(gtp.make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))]))


def numbers(shape):
    rng = np.random.default_rng(shape[1])
    kernel = (rng.normal(size=shape) * np.exp(3 * rng.normal(size=shape))).astype(np.float32)
    kernel[:, :1] = 0
    return kernel


USUAL = ["half a tile", "kernels of odd sizes"]


@pytest.mark.parametrize("place", others_full(PLACES, USUAL))
def test_a_layer_multiplies_the_codes_of_one_device(place):
    sizes, degrees, options = PLACES[place]
    names = {str(i): size for i, size in enumerate(sizes)}
    kernels = [numbers((WIDTH, size)) for size in sizes]
    given = dict(zip(sizes, kernels, strict=True))

    with scope(degrees):
        options = dict(dtype="float32", kernel_init=lambda _, shape, __: given[shape[1]], **options)
        layer = gtp.init(lambda rngs: gtp.Dense(WIDTH, names, rngs=rngs, **options), nnx.Rngs(0))
        with gtp.use_recipe(gtp.recipes.FP8Blocks(exclude=())):
            x = jnp.repeat(jnp.eye(WIDTH)[:, None], 8, axis=1)  # a sequence that tp divides
            found = jax.jit(lambda x: layer(x))(x)
    for kernel, product in zip(kernels, (found[name] for name in names), strict=True):
        np.testing.assert_array_equal(np.asarray(product)[:, 0], oracle.rounded_blocked(kernel.T, (128, 128)).T)


class Model(nnx.Module):
    """A stack of fused kernels, cut by 8 ranks, and a layer outside of it."""

    def __init__(self, rngs):
        self.blocks = gtp.Stack(lambda rngs: gtp.MLP(64, 192, dtype="float32", rngs=rngs), 2, rngs=rngs)
        self.last = gtp.Dense(64, {"a": 32, "b": 64}, dtype="float32", rngs=rngs)

    def __call__(self, x):
        found = self.last(self.blocks(x))
        return jnp.concatenate([found["a"], found["b"]], -1)


def loss(model, batch):
    errors = jnp.mean((model(batch["x"]) - batch["y"]) ** 2, -1)
    return errors.sum(), jnp.float32(errors.size)


def batch(features=64, out_features=96):
    rng = np.random.default_rng(1)
    sizes = {"x": features, "y": out_features}
    return {name: rng.normal(size=(8, 4, size)).astype(np.float32) for name, size in sizes.items()}


@pytest.mark.full
@pytest.mark.parametrize("degrees", [dict(gtp=2, dp=2), dict(gtp=4)], ids=str)
def test_one_maximum_is_reduced_and_weights_travel_as_bytes(degrees):
    with scope(degrees):
        optimizer = optax.sgd(0.1)
        model = gtp.init(Model, nnx.Rngs(0))
        told = {fact.module: fact.bytes for fact in gtp.explain(model, gtp.recipes.FP8Blocks()).facts}
        state = gtp.TrainState.create(model, optimizer)
        text = gtp.train_step(loss, optimizer, recipe=gtp.recipes.FP8Blocks()).lower(state, batch()).compile().as_text()
    assert told == {"blocks.layers.up": 2 * 192 * 64, "blocks.layers.down": 192 * 64, "last": 96 * 64}
    found = hlo.collectives(text)
    (reduced,) = [c for c in found if c.kind == "all-reduce" and "pmax" in c.op_name]
    assert reduced.times == 1 and reduced.dtype == "s32"
    # tiles of gate and up (2 x 1 each) and down (1 x 2) of two layers, and two tiles of `last`
    assert reduced.operand_bytes == 4 * (2 * 6 + 2)
    gathers = [c for c in found if c.kind == "all-gather"]
    assert {c.dtype for c in gathers} == {"u8"}
    along = sum(c.result_bytes * c.times for c in gathers if c.axes == ("gtp",) and c.direction == "forward")
    assert along == 2 * 3 * 192 * 64 + 96 * 64


@functools.cache
def trained(degrees, **options):
    """The losses of two steps, and the parameters after them."""
    with scope(dict(degrees)):
        optimizer = optax.sgd(0.1)
        state = gtp.TrainState.create(placed(Model), optimizer)
        step = gtp.train_step(loss, optimizer, recipe=gtp.recipes.FP8Blocks(), **options)
        losses = []
        for _ in range(2):
            state, metrics = step(state, batch())
            losses.append(float(metrics["loss"]))
        return losses, jax.tree.map(np.asarray, state.params)


STEPS = [
    ((("gtp", 2), ("dp", 2)), dict(microbatches=2)),
    ((("gtp", 8),), {}),
    ((("gtp", 4),), dict(view="local")),
]


@pytest.mark.parametrize("degrees, options", others_full(STEPS, STEPS[2:]), ids=str)
def test_a_step_is_that_of_one_device(degrees, options):
    losses, params = trained((("gtp", 1),))
    found, there = trained(degrees, **options)
    # each rank's tokens are rounded along tokens by themselves, in runs of its own
    np.testing.assert_allclose(found, losses, rtol=1e-3)
    assert found[0] == pytest.approx(losses[0], rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), there, params)
