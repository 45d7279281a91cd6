"""Steps of experts in FP8 with blocks of 128 are those of one device, on meshes that cut tiles and divide experts."""

import functools
import math

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from selection import others_full

import gtp_jax as gtp

EXPERTS, FEATURES, SMALL = 4, 128, 2.0**-20


def loss(model, batch):
    errors = ((model(batch["x"]) - batch["y"]) ** 2).mean(-1)
    return errors.sum(), np.float64(errors.size)


def trained(degrees, recipe, microbatches=1, **options):
    """Losses of two steps, and how the first changed each parameter."""
    rng = np.random.default_rng(1)
    batch = {name: rng.normal(size=(16, 4, FEATURES)) for name in "xy"}
    optimizer = optax.sgd(4.0)
    with jax.set_mesh(gtp.make_mesh(**degrees, devices=jax.devices()[: math.prod(degrees.values())])):
        sizes = dict(num_experts=EXPERTS, top_k=2, round_size=8.0, aux_loss_coeff=0.0)
        dtypes = dict(dtype="float64", param_dtype="float64")
        make = lambda rngs: gtp.nn.MoE(FEATURES, 256, **sizes, **dtypes, **options, rngs=rngs)  # noqa: E731
        model = gtp.init(make, nnx.Rngs(0))
        # `up` then gets gradients so small that they would be lost in a block with those of `gate`
        gate = model.up.kernel["gate"]
        gate.set_value(gate.get_value() * SMALL)
        state = gtp.TrainState.create(model, optimizer)
        step = gtp.train_step(loss, optimizer, recipe=recipe, microbatches=microbatches)
        params, losses = [], []
        for _ in range(2):
            params.append(jax.tree.map(np.asarray, state.params))
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        return losses, jax.tree.map(lambda before, after: after - before, *params)


@functools.cache
def on_one_device(microbatches, quantized=True):
    return trained({}, gtp.recipes.FP8Blocks(exclude=()) if quantized else None, microbatches)


# Blocks of wgrad run along the tokens that an expert gets at once: those of the ranks that send to it. So a mesh rounds
# what one device rounds in one microbatch for each such set of ranks.
MESHES = {
    "gtp 8": (dict(gtp=8), 8, {}),
    "gtp 4 x ep 2": (dict(gtp=4, ep=2), 4, {}),
    "gtp 2 x tp 2 x ep 2": (dict(gtp=2, tp=2, ep=2), 2, {}),
    "gtp 2 x tp 2 x ep 2, experts over both": (dict(gtp=2, tp=2, ep=2), 2, dict(parallel="expert")),
}


def distances(found, wanted):
    return jax.tree.map(lambda a, b: float(np.linalg.norm(a - b) / np.linalg.norm(b)), found, wanted)


@pytest.mark.parametrize("name", others_full(MESHES, ["gtp 2 x tp 2 x ep 2"]))
def test_steps_are_those_of_one_device(name, x64):
    degrees, microbatches, options = MESHES[name]
    losses, changes = on_one_device(microbatches)
    found, there = trained(degrees, gtp.recipes.FP8Blocks(exclude=()), **options)
    np.testing.assert_allclose(found, losses, rtol=1e-9)
    assert max(jax.tree.leaves(distances(there, changes))) < 1e-6  # gradients of weights are summed in float32
