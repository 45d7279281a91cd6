"""A step's recipe is its argument, otherwise the one in scope at the call; its XLA options follow from the same."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from messages import naming
from placed import placed

import gtp_jax as gtp
from gtp_jax.train import compile_options

FP8 = gtp.FP8(matmuls=True)
OPTIMIZER = optax.sgd(0.1)


def squares(model, x):
    return jnp.mean(model(x) ** 2)


def block(rngs):
    return gtp.MLP(32, 64, dtype=jnp.bfloat16, rngs=rngs)


@pytest.mark.parametrize(
    "make", [lambda **o: gtp.train_step(squares, OPTIMIZER, **o), lambda **o: gtp.eval_step(squares, **o)]
)
def test_options_are_those_of_the_recipe_at_the_call(make, monkeypatch):
    given = []
    monkeypatch.setattr("gtp_jax.train._step.platform", lambda: "gpu")
    monkeypatch.setattr("jax.jit", lambda f, **options: given.append(options["compiler_options"]))
    plain, fp8 = compile_options("gpu"), compile_options("gpu", fp8=True)
    step = make()
    for recipe in (FP8, None, gtp.FP8(), FP8):
        with gtp.use_recipe(recipe):
            step.jitted()
    assert given == [fp8, plain] and plain != fp8
    given.clear()
    with gtp.use_recipe(FP8):
        make(recipe=gtp.recipes.BF16()).jitted()
        make(recipe=FP8).jitted()
    assert given == [plain, fp8]


@pytest.mark.parametrize("where", ["`compiler_options`", "XLA_FLAGS"])
def test_delayed_scales_that_xla_would_round_are_refused_on_gpus(where, monkeypatch):
    own = {"xla_allow_excess_precision": False} if where == "`compiler_options`" else None
    if own is None:
        monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --xla_allow_excess_precision=false")
    delayed, current = (
        gtp.train_step(squares, OPTIMIZER, compiler_options=own, recipe=recipe).jitted
        for recipe in (gtp.recipes.FP8Delayed(), FP8)
    )
    delayed()  # on CPUs, scales are applied in float32
    monkeypatch.setattr("gtp_jax.train._step.platform", lambda: "gpu")
    current()
    with pytest.raises(ValueError, match=naming(where, "`xla_allow_excess_precision`")):
        gtp.train_step(squares, OPTIMIZER, compiler_options=own, recipe=gtp.recipes.FP8Delayed()).jitted()


def copy(state):
    return jax.tree.map(lambda a: jax.device_put(np.array(a), a.sharding), state)


X = np.random.default_rng(0).normal(size=(8, 4, 32)).astype(jnp.bfloat16)


@pytest.fixture
def mesh():
    with jax.set_mesh(gtp.make_mesh(gtp=2, devices=jax.devices()[:2])):
        yield


def stacked(rngs):
    return gtp.Stack(block, 2, rngs=rngs)


def test_one_step_has_the_recipe_in_scope_at_each_call_as_if_it_were_the_argument(mesh):
    state = gtp.TrainState.create(placed(block), OPTIMIZER)
    step, found = gtp.train_step(squares, OPTIMIZER), {}
    argued, _ = gtp.train_step(squares, OPTIMIZER, recipe=FP8)(copy(state), X)
    for recipe in (None, FP8):
        with gtp.use_recipe(recipe):
            found[recipe] = step(copy(state), X)
    jax.tree.map(np.testing.assert_array_equal, argued.params, found[FP8][0].params)
    assert found[FP8][1]["grad_norm"] != found[None][1]["grad_norm"]


def test_codes_are_gathered_in_advance_of_the_recipe_in_scope_alone(mesh):
    ahead = gtp.train_step(squares, OPTIMIZER, microbatches=2, pregathered_layers="all")
    with pytest.raises(ValueError, match=naming("recipe codes")):
        ahead.trace(gtp.TrainState.create(gtp.nn.abstract_model(stacked), OPTIMIZER), X)
    with gtp.use_recipe(gtp.NVFP4()):
        ahead.trace(gtp.TrainState.create(gtp.nn.abstract_model(stacked), OPTIMIZER), X)
