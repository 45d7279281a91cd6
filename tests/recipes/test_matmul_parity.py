"""With operands in block formats a model is the same on every mesh, in any number of microbatches, and trains."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from selection import others_full

import gtp_jax as gtp
from gtp_jax.models import LlamaConfig, next_token_loss

from ..parity.plain_llama import loss_and_gradient
from .oracles import dequantized
from .test_recipe_parity import ALIGNED, assert_close, batch_of, host, neighbours_together, scope, start

# Blocks of 32 rows lie within a shard.
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=128,
    dtype="float64",
)  # fmt: skip
RECIPES = {
    "MXFP8": gtp.MXFP8(matmuls=True),
    "NVFP4": gtp.NVFP4(matmuls=True, stochastic=False),  # random bits go by the place in a rank's own array
    "NVFP4, first in float64, down in MXFP8": gtp.NVFP4(
        matmuls=True, stochastic=False, high_precision_first=1, override={"mlp.down": gtp.MXFP8(matmuls=True)}
    ),
}
SHORT = dataclasses.replace(CONFIG, num_layers=1)


@functools.cache  # for all recipes and numbers of microbatches, which change neither
def start_of(**degrees):
    return start(CONFIG, optax.sgd(1.0))


@functools.cache
def on_one_device(name):
    return gradients(dict(gtp=1), RECIPES[name])


def gradients(degrees, recipe, parts=1):
    batch = batch_of(CONFIG, 8, 32)
    with scope(degrees):
        state = start_of(**degrees)
        run = jax.jit(
            lambda s, b: gtp.train.loss_and_gradients(next_token_loss, s, b, microbatches=parts, recipe=recipe)
        )
        loss, found = run(state, neighbours_together(batch, degrees, parts))
        return float(loss), host(found)


def dense_gradients(degrees, recipe, parts, sizes):
    """Of a layer with kernels of these sizes in one fused weight, behind another, which sees dgrad."""
    rng = np.random.default_rng(0)
    x, ahead = rng.normal(size=(8, 16, 64)), rng.normal(size=(64, 64))
    kernels = {size: rng.normal(size=(64, size)) for size in sizes}

    class Plain(nnx.Module):
        def __init__(self, rngs):
            options = dict(dtype="float64", param_dtype="float64")
            self.ahead = gtp.Dense(64, 64, kernel_init=lambda *_: ahead, rngs=rngs, **options)
            names = {str(size): size for size in sizes}
            self.dense = gtp.Dense(64, names, kernel_init=lambda _, shape, __: kernels[shape[1]], rngs=rngs, **options)

        def __call__(self, x):
            return self.dense(self.ahead(x))

    def loss(model, batch):
        return sum((y**3).sum() for y in model(batch["x"]).values()), np.float64(batch["x"].shape[0])

    with scope(degrees):
        state = gtp.TrainState.create(gtp.init(Plain, nnx.Rngs(0)), optax.sgd(1.0))
        run = jax.jit(lambda s, b: gtp.train.loss_and_gradients(loss, s, b, microbatches=parts, recipe=recipe))
        value, found = run(state, neighbours_together({"x": x}, degrees, parts))
        return float(value), host(found)


LAYERS = [
    ("NVFP4", dict(gtp=2), 2, (96,)),
    ("MXFP8", dict(gtp=2), 2, (96,)),
    ("NVFP4", dict(gtp=4), 1, (56, 120)),  # no multiples of a block: padded, and no block has two kernels in it
]


@pytest.mark.parametrize("name, degrees, parts, sizes", others_full(LAYERS, LAYERS[:1]), ids=str)
def test_a_dense_layer_has_the_gradients_of_one_device(name, degrees, parts, sizes, x64):
    loss, wanted = dense_gradients(dict(gtp=1), RECIPES[name], 1, sizes)
    there, found = dense_gradients(degrees, RECIPES[name], parts, sizes)
    assert abs(there - loss) <= 1e-12 * abs(loss)
    assert_close(found, wanted, 1e-11)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, degrees, parts",
    [(name, degrees, parts) for name in RECIPES for degrees, parts in ((dict(gtp=2, tp=2), 2), (dict(gtp=4), 1))],
)
def test_loss_and_gradients_are_those_of_one_device_to_the_rounding_of_float64(name, degrees, parts, x64):
    loss, wanted = on_one_device(name)
    there, found = gradients(degrees, RECIPES[name], parts)
    assert abs(there - loss) <= 1e-12 * loss
    # products of float32 values leave float64's rounding, which a code could in principle amplify
    assert_close(found, wanted, 1e-11)


class Again(nnx.Module):
    """A module that is called some times on one input: alone, or within the layer of a stack."""

    def __init__(self, rngs, calls, stacked):
        class Layer(gtp.nn.Layer):
            def __init__(self, rngs):
                self.dense, self.sequence_parallel = gtp.Dense(32, 32, dtype="float32", rngs=rngs), False

            def local(self, x):
                return sum(self.dense(x) for _ in range(calls))

        self.inner = gtp.Stack(Layer, 1, rngs=rngs) if stacked else Layer(rngs)

    def __call__(self, x):
        return self.inner(x)


@pytest.mark.parametrize("stacked", others_full([False, True], [True]))
def test_two_calls_of_a_module_are_not_rounded_alike(stacked):
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(2, 32, 32)), "g": rng.normal(size=(2, 32, 32))}
    loss = lambda model, b: ((model(b["x"]) * b["g"]).sum(), np.float32(2))  # noqa: E731  of each call the same gradient

    def gradient(calls, recipe):
        with scope(dict(gtp=1)):
            make = lambda rngs: Again(rngs, calls, stacked)  # noqa: E731
            state = gtp.TrainState.create(gtp.init(make, nnx.Rngs(0)), optax.sgd(1.0))
            run = jax.jit(lambda s, b: gtp.train.loss_and_gradients(loss, s, b, recipe=recipe)[1])
            return jax.tree.leaves(host(run(state, batch)))[0]

    to_nearest, stochastic = gtp.NVFP4(matmuls=True, stochastic=False), gtp.NVFP4(matmuls=True)
    np.testing.assert_array_equal(gradient(2, to_nearest), 2 * gradient(1, to_nearest))
    once, twice = gradient(1, stochastic), gradient(2, stochastic)
    differing = np.mean(twice != 2 * once)
    assert differing > 0.9
    assert np.linalg.norm(twice - 2 * once) < 0.5 * np.linalg.norm(twice)


@pytest.mark.full
@pytest.mark.parametrize("unroll", ["full", 1])
def test_first_and_last_layers_stay_as_they_are(unroll, x64):
    config = dataclasses.replace(ALIGNED, num_layers=4, unroll=unroll, keep_gathered=2 if unroll == 1 else 1)
    recipe, batch = gtp.NVFP4(high_precision_first=1, high_precision_last=1), batch_of(config)
    with scope(dict(gtp=4)):
        state = start(config, optax.sgd(1.0))
        run = jax.jit(lambda s, b: gtp.train.loss_and_gradients(next_token_loss, s, b, recipe=recipe))
        loss, found = run(state, batch)
        found, params = host(found), host(state.params)
    rounded = dequantized(params, recipe.wire, config.dtype)
    layers = jax.tree.map(
        lambda a, b: np.concatenate([a[:1], b[1:3], a[3:]]), params["blocks"]["layers"], rounded["blocks"]["layers"]
    )
    wanted = loss_and_gradient(config)({**rounded, "blocks": {"layers": layers}}, batch)
    assert abs(float(loss) - float(wanted[0])) <= 1e-12 * float(loss)
    assert_close(found, host(wanted[1]), 1e-12)
