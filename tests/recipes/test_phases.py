"""Recipes that follow one another: each step is that of its phase's recipe, also after skips, resumed and traced."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming

import gtp_jax as gtp
from gtp_jax.recipes import BF16, FP8Delayed, Phases
from gtp_jax.train import _phased

PHASES = Phases({0: gtp.NVFP4(), 2: gtp.FP8(matmuls=True), 3: BF16()})
OPTIMIZER = optax.sgd(1e-2, momentum=0.9)
BATCH = tuple(np.random.default_rng(seed).normal(size=(16, 64)).astype(np.float32) for seed in (1, 2))


class Net(nnx.Module):
    def __init__(self, rngs, linear=nnx.Linear):
        self.a = linear(64, 128, use_bias=False, rngs=rngs)
        self.b = linear(128, 64, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.b(jnp.tanh(self.a(x)))


def loss(model, batch):
    return jnp.mean((model(batch[0]) - batch[1]) ** 2)


def fresh(frozen=False):
    if frozen:
        own = gtp.init(lambda rngs: Net(rngs, functools.partial(gtp.Dense, dtype=jnp.float32)), nnx.Rngs(0))
        model = gtp.nn.freeze(own, gtp.NVFP4(), trained=nnx.PathContains("b"))
    else:
        model = gtp.shard(Net(nnx.Rngs(0)), blocks=("a", "b"), min_size=1)
    return gtp.TrainState.create(model, OPTIMIZER, recipe=PHASES)


def after(step, state, steps, skips=()):
    losses = []
    for number in range(steps + len(skips)):
        state, metrics = step(state, BATCH, jnp.asarray(number in skips)) if skips else step(state, BATCH)
        losses.append(float(metrics["loss"]))
    return state, losses


def assert_same_bits(one, other):
    for found, wanted in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()


@pytest.mark.parametrize("frozen", [False, pytest.param(True, marks=pytest.mark.full)])
def test_each_step_is_that_of_its_recipe_and_the_host_reads_its_number_at_boundaries_only(frozen, monkeypatch):
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        alone = [gtp.train_step(loss, OPTIMIZER, recipe=PHASES.at(start)) for start in PHASES.starts]
        wanted, losses = fresh(frozen), []
        for number in range(5):
            wanted, metrics = alone[PHASES.number(number)](wanted, BATCH)
            losses.append(float(metrics["loss"]))
        reads = []
        value = _phased._value
        monkeypatch.setattr(_phased, "_value", lambda step: reads.append(step) or value(step))
        step = gtp.train_step(loss, OPTIMIZER, recipe=PHASES)
        found, made = after(step, fresh(frozen), 5)
        assert_same_bits(found, wanted)
        assert made == losses and len(reads) == 3  # at the start, and where a phase may have begun
        if frozen:
            return
        # a skipped step makes no update, and does not count
        found, made = after(step, fresh(), 5, skips=(1, 3))
        assert_same_bits(found, wanted)
        assert [made[number] for number in (0, 2, 4, 5, 6)] == losses
        # a state of another step, such as one that was restored
        again = [dataclasses.replace(fresh(), step=jnp.full_like(found.step, 3)) for _ in range(2)]
        assert step(again[0], BATCH)[1]["loss"] == alone[2](again[1], BATCH)[1]["loss"]
        evaluate, last = gtp.eval_step(loss, recipe=PHASES), gtp.eval_step(loss)(found, BATCH)["loss"]
        assert evaluate(found, BATCH)["loss"] == last == evaluate(dataclasses.replace(found, step=7), BATCH)["loss"]
        # two states in turn
        states, reads[:] = [fresh(), fresh()], []
        for number in range(10):
            states[number % 2] = step(states[number % 2], BATCH)[0]
        assert_same_bits(states[0], states[1])
        assert_same_bits(states[0], wanted)
        assert len(reads) == 6


@pytest.mark.full
def test_within_a_jit_the_program_chooses_the_phase():
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        step = gtp.train_step(loss, OPTIMIZER, recipe=PHASES)
        wanted, losses = after(step, fresh(), 5)

        def one(state, _):
            state, metrics = step(state, BATCH)
            return state, metrics["loss"]

        found, made = jax.jit(lambda state: jax.lax.scan(one, state, None, length=5))(fresh())
    np.testing.assert_allclose(made, losses, rtol=1e-6)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_a_phase_that_does_not_fit_is_refused_before_the_first_step():
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        state = fresh()
        late = Phases({0: gtp.NVFP4(), 9000: gtp.MXFP8(override={"c": gtp.FP8()})})
        with pytest.raises(ValueError, match=naming("'c'")):
            gtp.train_step(loss, OPTIMIZER, recipe=late)(state, BATCH)


BAD = {
    "none": ({}, "`recipes` (none) step 0"),
    "late": ({1: BF16()}, "`recipes` 1 step 0"),
    "not ascending": (((0, BF16()), (5, gtp.FP8()), (3, BF16())), "0, 5, 3 after"),
    "delayed": ({0: BF16(), 2: FP8Delayed()}, "`recipes` FP8Delayed amaxes `gtp_jax.FP8(matmuls=True)`"),
    "no recipe": ({0: None}, "`recipes` {0: None} first step"),
    "no step": ({True: BF16()}, "`recipes` first step"),
    "too late": ({0: BF16(), 2**31: BF16()}, "`recipes` 2147483648 2,147,483,647"),
    "no mapping": (3, "`recipes` 3 first step"),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes_are_refused_by_name(name):
    recipes, message = BAD[name]
    with pytest.raises((TypeError, ValueError), match=naming(*message.split())):
        Phases(recipes)


def test_what_takes_one_recipe_refuses_phases():
    with pytest.raises(TypeError, match=naming("`recipe`", "Phases", "`phases.at(step)`")):
        gtp.use_recipe(PHASES)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=naming("`recipe`", "`Phases`", "`replicas`")):
        gtp.train_step(loss, OPTIMIZER, recipe=PHASES, replicas=object(), view="local")  # pyright: ignore
