"""Layers gathered ahead of the microbatches: gathered once a step, counted, weighed, and changing no bit of the
result."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.models import LlamaConfig, next_token_loss

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
    config = dataclasses.replace(LlamaConfig(**SIZES), **changes)
    mesh = gtp.make_mesh(gtp=DEGREE, dp=2)
    return lowered_step(
        config, mesh, batch=8 * parts, seq=16, microbatches=parts, recipe=recipe, pregathered_layers=pregathered_layers
    )


@pytest.mark.slow
@pytest.mark.parametrize("pregathered_layers, parts, changes", [(2, 3, {}), ("all", 3, {}), (1, 1, dict(unroll=1))])
def test_pregathered_layers_are_gathered_once_a_step_and_the_others_in_every_pass(pregathered_layers, parts, changes):
    recipe = gtp.NVFP4()
    found = hlo.collectives(lowered(recipe, pregathered_layers, parts, **changes).compile().as_text())
    gathers = [c for c in found if c.axes == ("gtp",) and c.kind == "all-gather" and c.dtype == "u8"]
    layer, count = (
        buffer_bytes(recipe.wire, DEGREE, KERNELS),
        LAYERS if pregathered_layers == "all" else pregathered_layers,
    )
    sizes = [c.operand_bytes for c in gathers for _ in range(c.times)]
    # a pregathered layer of one alone is as large as the others
    assert sorted(sizes) == sorted([count * layer] + [layer] * (2 * parts * (LAYERS - count)))


class Layers(nnx.Module):
    def __init__(self, rngs):
        self.stack = gtp.Stack(lambda rngs: gtp.Dense(64, 64, dtype="float32", rngs=rngs), length=4, rngs=rngs)

    def __call__(self, x):
        return self.stack(x)


def cubes(model, batch):
    return (model(batch["x"]) ** 3).sum(), np.float32(batch["x"].shape[0])


@pytest.mark.parametrize("grad_wire", [None, pytest.param("mxfp8", marks=pytest.mark.slow)])
def test_pregathered_layers_are_counted_from_the_first_that_travels_as_codes(grad_wire):
    recipe = gtp.NVFP4(high_precision_first=1, high_precision_last=1, grad_wire=grad_wire)
    parts, found, gathers = 2, [], []
    x = np.random.default_rng().normal(size=(16, 4, 64)).astype(np.float32)
    with scope(dict(gtp=4)):
        state = gtp.TrainState.create(gtp.init(Layers, nnx.Rngs(0)), optax.sgd(1.0))
        for pregathered_layers in (0, 1):
            run = jax.jit(
                lambda s, b, n=pregathered_layers: gtp.loss_and_gradients(
                    cubes, s, b, microbatches=parts, recipe=recipe, pregathered_layers=n
                )
            )
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


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("pregathered_layers", [1, "all"])
def test_not_a_bit_of_loss_and_gradients_changes(name, pregathered_layers):
    config, degrees, parts, recipe = CASES[name]
    config, found = dataclasses.replace(config, dtype="float32"), []
    with scope(degrees):
        state, batch = start(config, optax.sgd(1.0)), batch_of(config, size=16 * parts)
        for count in (0, pregathered_layers):
            run = jax.jit(
                lambda s, b, count=count: gtp.loss_and_gradients(
                    next_token_loss, s, b, microbatches=parts, recipe=recipe, pregathered_layers=count
                )
            )
            found.append(host(run(state, batch)))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_cannot_be_pregathered_is_refused():
    with pytest.raises(
        ValueError, match="`pregathered_layers` is -1; it must be a number of layers, at least 0, or 'all'"
    ):
        gtp.train_step(next_token_loss, optax.sgd(1.0), recipe=gtp.NVFP4(), pregathered_layers=-1)
    with pytest.raises(
        ValueError,
        match="`pregathered_layers` is 'all', but without a recipe there are no codes to gather in advance",
    ):
        lowered(None, "all", 1)
    with pytest.raises(
        ValueError,
        match="`pregathered_layers` is 2, but no layers of a `Stack` are sent as codes that could be gathered",
    ):
        lowered(gtp.BF16(), 2, 1)
    with pytest.raises(ValueError, match="`pregathered_layers` is 1, but no layers of a `Stack` are sent as codes"):
        lowered(gtp.NVFP4(high_precision_first=1, high_precision_last=LAYERS - 1), 1, 1)
    loss = lambda model, x: jnp.mean(model(x))  # noqa: E731
    with scope(dict(gtp=2)), pytest.raises(ValueError, match="is 1, but no layers of a `Stack` are sent as codes"):
        state = gtp.TrainState.create(gtp.init(lambda rngs: gtp.Dense(64, 64, rngs=rngs), nnx.Rngs(0)), optax.sgd(1.0))
        gtp.train_step(loss, optax.sgd(1.0), recipe=gtp.NVFP4(), pregathered_layers=1).lower(state, jnp.ones((2, 64)))


def test_more_layers_than_a_stack_has_are_not_pregathered():
    config = dataclasses.replace(ALIGNED, dtype="float32")
    with scope(dict(gtp=2)):
        state = start(config, optax.sgd(1.0))
        step = gtp.train_step(
            next_token_loss, optax.sgd(1.0), recipe=gtp.NVFP4(high_precision_last=1), pregathered_layers=2
        )
        with pytest.raises(
            ValueError, match="`pregathered_layers` is 2, but no `Stack` has more than 1 layers that are sent as codes"
        ):
            step(state, batch_of(config))
