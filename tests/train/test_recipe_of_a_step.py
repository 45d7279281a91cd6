"""A step's recipe is its argument, otherwise the one in scope at the call; its XLA options follow from the same."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

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
        make(recipe=gtp.BF16()).jitted()
        make(recipe=FP8).jitted()
    assert given == [plain, fp8]


@pytest.mark.parametrize("where", ["`compiler_options`", "XLA_FLAGS"])
def test_delayed_scales_that_xla_would_round_are_refused_on_gpus(where, monkeypatch):
    own = {"xla_allow_excess_precision": False} if where == "`compiler_options`" else None
    if own is None:
        monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --xla_allow_excess_precision=false")
    delayed, current = (
        gtp.train_step(squares, OPTIMIZER, compiler_options=own, recipe=recipe).jitted
        for recipe in (gtp.FP8Delayed(), FP8)
    )
    delayed()  # on CPUs, scales are applied in float32
    monkeypatch.setattr("gtp_jax.train._step.platform", lambda: "gpu")
    current()
    with pytest.raises(
        ValueError, match=f"{where} sets `xla_allow_excess_precision` to (F|f)alse, with which XLA would"
    ):
        gtp.train_step(squares, OPTIMIZER, compiler_options=own, recipe=gtp.FP8Delayed()).jitted()


def test_under_each_recipe_in_scope_one_step_computes_what_the_argument_does():
    x = jax.random.normal(jax.random.key(0), (4, 4, 32), jnp.bfloat16)
    with jax.set_mesh(gtp.make_mesh(gtp=2, devices=jax.devices()[:2])):
        state = gtp.TrainState.create(gtp.init(lambda rngs: gtp.Stack(block, 2, rngs=rngs), nnx.Rngs(0)), OPTIMIZER)
        step, norms = gtp.train_step(squares, OPTIMIZER), []
        for recipe in (None, FP8):
            argued, _ = gtp.train_step(squares, OPTIMIZER, recipe=recipe)(jax.tree.map(jnp.copy, state), x)
            with gtp.use_recipe(recipe):
                scoped, metrics = step(jax.tree.map(jnp.copy, state), x)
            jax.tree.map(np.testing.assert_array_equal, argued.params, scoped.params)
            norms.append(float(metrics["grad_norm"]))
        assert norms[0] != norms[1]
        with gtp.use_recipe(gtp.NVFP4(stochastic=False)):
            ahead = gtp.train_step(squares, OPTIMIZER, microbatches=2, pregathered_layers="all")
            _, metrics = ahead(jax.tree.map(jnp.copy, state), x)
            _, wanted = gtp.train_step(squares, OPTIMIZER, microbatches=2)(jax.tree.map(jnp.copy, state), x)
        assert float(metrics["grad_norm"]) == float(wanted["grad_norm"])
        message = "without a recipe there are no codes to gather in advance: no recipe was passed, and none is in"
        with pytest.raises(ValueError, match=message):
            ahead(state, x)


def test_check_compares_steps_under_the_recipe_in_scope():
    x = jax.random.normal(jax.random.key(0), (8, 4, 32), jnp.float32)
    with jax.set_mesh(gtp.make_mesh(gtp=8)):

        def errors(**options):
            make = lambda rngs: gtp.MLP(32, 64, dtype="float32", rngs=rngs)  # noqa: E731
            return gtp.check(squares, make, x, tolerance=1.0, **options)

        with gtp.use_recipe(FP8):
            scoped = errors()
        assert scoped == errors(recipe=FP8) != errors()
