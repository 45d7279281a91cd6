"""Layers gathered ahead of the microbatches: gathered once a step, counted, weighed, and changing no bit of the
result."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming
from selection import others_full

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.models import LlamaConfig, next_token_loss
from gtp_jax.nn import abstract_model

from ..chain.programs import lowered_step
from .test_recipe_collectives import LAYERS, SIZES, buffer_bytes
from .test_recipe_parity import ALIGNED, UNALIGNED, batch_of, host, scope, start

DEGREE = 4
KERNELS = [(256, 128), (128, 128), (128, 128), (128, 256), (384, 128), (384, 128), (128, 384)]


ENDS = gtp.NVFP4(
    high_precision_first=1,
    high_precision_last=1,
    matmuls=True,
    override={"mlp.down": gtp.MXFP8(), "attention.out": gtp.BF16()},
)


def lowered(recipe, pregathered_layers, parts, **changes):
    config, mesh = dataclasses.replace(LlamaConfig(**SIZES), **changes), gtp.make_mesh(gtp=DEGREE, dp=2)
    options = dict(microbatches=parts, recipe=recipe, pregathered_layers=pregathered_layers)
    return lowered_step(config, mesh, batch=8 * parts, seq=16, **options)


class Layers(nnx.Module):
    def __init__(self, rngs):
        self.stack = gtp.Stack(lambda rngs: gtp.Dense(64, 64, dtype="float32", rngs=rngs), length=4, rngs=rngs)

    def __call__(self, x):
        return self.stack(x)


def cubes(model, batch):
    return (model(batch["x"]) ** 3).sum(), np.float32(batch["x"].shape[0])


@pytest.mark.parametrize("grad_wire", others_full([None, "mxfp8"], [None]))
def test_pregathered_layers_are_counted_from_the_first_that_travels_as_codes(grad_wire):
    recipe = gtp.NVFP4(high_precision_first=1, high_precision_last=1, grad_wire=grad_wire)
    parts, found, gathers = 2, [], []
    x = np.random.default_rng(0).normal(size=(16, 4, 64)).astype(np.float32)
    with scope(dict(gtp=4)):
        state = gtp.TrainState.create(gtp.init(Layers, nnx.Rngs(0)), optax.sgd(1.0))
        for pregathered_layers in (0, 1):
            options = dict(microbatches=parts, recipe=recipe, pregathered_layers=pregathered_layers)
            run = jax.jit(lambda s, b, options=options: gtp.loss_and_gradients(cubes, s, b, **options))
            program = run.lower(state, {"x": x}).compile()
            found.append(host(program(state, {"x": x})))
            every = [c for c in hlo.collectives(program.as_text()) if c.kind == "all-gather"]
            gathers.append({kind: sum(c.times for c in every if c.dtype == kind) for kind in ("u8", "f32")})
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(a, b)
    # two layers of codes, forward and backward; then one of them once, and the other as before
    assert [each["u8"] for each in gathers] == [2 * 2 * parts, 1 + 2 * parts]
    assert gathers[0]["f32"] == gathers[1]["f32"]


@pytest.mark.slow
def test_pregathered_layers_take_the_codes_bytes_on_every_device():
    layer = DEGREE * buffer_bytes(gtp.NVFP4().wire, DEGREE, KERNELS)
    few, many = (
        lowered(gtp.NVFP4(), pregathered_layers, 2, num_layers=6).compile().memory_analysis().temp_size_in_bytes
        for pregathered_layers in (2, 5)
    )
    assert layer < many - few < 3.5 * layer, (many - few) / layer  # less what they would need while they are gathered


CASES = {
    "gtp 4, three microbatches": (ALIGNED, dict(gtp=4), 3, gtp.NVFP4()),
    "gtp 2 x tp 2, experts": (dataclasses.replace(ALIGNED, num_experts=4), dict(gtp=2, tp=2), 2, gtp.FP8()),
    "gtp 8, unaligned, looped": (dataclasses.replace(UNALIGNED, unroll=1, num_layers=4), dict(gtp=8), 2, gtp.MXFP8()),
    "gtp 2 x tp 2, ends in high precision": (
        dataclasses.replace(ALIGNED, num_layers=4),
        dict(gtp=2, tp=2),
        2,
        ENDS,
    ),
    "one device": (UNALIGNED, dict(gtp=1), 2, gtp.NVFP4()),
}


@pytest.mark.full
@pytest.mark.parametrize("name, pregathered_layers", list(zip(CASES, ["all", 1, "all", 1, "all"], strict=True)))
def test_not_a_bit_of_loss_and_gradients_changes(name, pregathered_layers):
    config, degrees, parts, recipe = CASES[name]
    config, found = dataclasses.replace(config, dtype="float32"), []
    with scope(degrees):
        state, batch = start(config, optax.sgd(1.0)), batch_of(config, size=16 * parts)
        for count in (0, pregathered_layers):
            options = dict(microbatches=parts, recipe=recipe, pregathered_layers=count)
            run = jax.jit(lambda s, b, options=options: gtp.loss_and_gradients(next_token_loss, s, b, **options))
            found.append(host(run(state, batch)))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_cannot_be_pregathered_is_refused():
    ends = gtp.NVFP4(high_precision_first=1, high_precision_last=LAYERS - 1)
    for recipe, count, message in (
        (gtp.NVFP4(), -1, "`pregathered_layers` -1 'all'"),
        (None, "all", "`pregathered_layers` 'all' recipe"),
        (gtp.BF16(), 2, "`pregathered_layers` 2 `Stack`"),
        (ends, 1, "`pregathered_layers` 1 `Stack`"),
        (gtp.NVFP4(high_precision_last=1), LAYERS, f"`pregathered_layers` {LAYERS} `Stack` {LAYERS - 1}"),
    ):
        with pytest.raises(ValueError, match=naming(message)):
            lowered(recipe, count, 1)
    loss = lambda model, x: jnp.mean(model(x))  # noqa: E731
    with scope(dict(gtp=2)), pytest.raises(ValueError, match=naming("`pregathered_layers` 1 `Stack`")):
        state = gtp.TrainState.create(abstract_model(lambda rngs: gtp.Dense(64, 64, rngs=rngs)), optax.sgd(1.0))
        gtp.train_step(loss, optax.sgd(1.0), recipe=gtp.NVFP4(), pregathered_layers=1).lower(state, jnp.ones((2, 64)))
