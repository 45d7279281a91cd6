"""A step whose loss or gradients are not finite changes nothing, says so, and costs no memory."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming
from placed import placed
from selection import pairwise

import gtp_jax as gtp

WIDTH, BATCH = 16, 16


class Model(nnx.Module):
    """A layer of this library, batch statistics and dropout, whose counts are variables too."""

    def __init__(self, rngs):
        self.dense = gtp.Dense(WIDTH, WIDTH, parallel="column", dtype=jnp.float32, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.dense(x)))


def loss(model, batch):
    """A mean; NaN if a row is marked 1, and with a gradient that is not finite if one is marked 2."""
    y = model(batch["x"])
    bad = jnp.where(batch["mark"] == 1, jnp.nan, 0.0)
    steep = jnp.sqrt(0.0 * y.sum((1, 2)) + jnp.where(batch["mark"] == 2, 0.0, 1.0))
    return jnp.mean(y**2) + bad.sum() + steep.sum()


def make_batch(mark=0):
    marks = np.zeros(BATCH, np.int32)
    marks[5] = mark  # of one rank's rows, in one microbatch
    return {"x": np.random.default_rng(0).normal(size=(BATCH, 8, WIDTH)).astype(np.float32), "mark": marks}


copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))


def host(state):
    """Values of a copy: a view of an array would keep its memory from being donated."""
    return jax.tree.leaves(jax.tree.map(np.asarray, copied(state)))


def assert_equal(one, other):
    assert all(a.tobytes() == b.tobytes() for a, b in zip(host(one), other, strict=True))


def test_a_flagged_step_changes_nothing_and_the_next_goes_on_from_there():
    optimizer = optax.adamw(1e-2)
    good, nan, steep = (make_batch(mark) for mark in (0, 1, 2))
    with jax.set_mesh(gtp.make_mesh(dp=2, gtp=2, tp=2)):
        step = gtp.train_step(loss, optimizer, microbatches=2, max_grad_norm=1.0)
        first_state = gtp.TrainState.create(gtp.init(Model, nnx.Rngs(0)), optimizer)
        state, never_skip = copied(first_state), jnp.zeros((), bool)
        compiled = step.lower(state, good, never_skip).compile()
        size = sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(state))
        assert compiled.memory_analysis().alias_size_in_bytes >= size  # donated, whatever the branch
        state, first = step(state, good, never_skip)
        before, donated = host(state), jax.tree.leaves((state.params, state.opt_state))
        assert not first["skipped"] and int(state.step) == 1
        gtp.train.check_finite(first)
        for bad, losses_finite in ((nan, False), (steep, True)):
            state, metrics = step(state, bad, never_skip)
            assert metrics["skipped"] and bool(jnp.isfinite(metrics["loss"])) == losses_finite
            assert_equal(state, before)
            with pytest.raises(FloatingPointError, match=naming("step 7 skipped")):
                gtp.train.check_finite(metrics, step=7)
            state, metrics = step(state, good, metrics["skipped"])  # launched behind it: does nothing either
            assert metrics["skipped"]
            gtp.train.check_finite(metrics)
            assert_equal(state, before)
        assert all(array.is_deleted() for array in donated)
        state, _ = step(state, good, never_skip)
        other = first_state
        for _ in range(2):
            other, _ = step(other, good, never_skip)
        assert_equal(state, host(other))


@pytest.mark.full
def test_on_one_device_a_finite_step_is_bit_for_bit_the_step_without_a_branch():
    optimizer, batch, found = optax.adamw(1e-2), make_batch(), []
    with jax.set_mesh(gtp.make_mesh(devices=jax.devices()[:1])):
        first = gtp.TrainState.create(gtp.init(Model, nnx.Rngs(0)), optimizer)
        for skip_nonfinite in (True, "loss", False):
            step = gtp.train_step(loss, optimizer, max_grad_norm=1.0, skip_nonfinite=skip_nonfinite)
            state = copied(first)
            for _ in range(3):
                state, _ = step(state, batch)
            found.append(state)
            if skip_nonfinite == "loss":
                kept, metrics = step(copied(state), make_batch(1))
                assert metrics["skipped"]
                assert_equal(kept, host(state))
                _, metrics = step(kept, make_batch(2))  # whose loss is finite
                assert not metrics["skipped"] and not np.isfinite(metrics["grad_norm"])
        for other in found[1:]:
            assert_equal(found[0], host(other))
        state, metrics = step(state, make_batch(2))  # which applies whatever it is
    assert not metrics["skipped"] and np.isnan(np.asarray(state.params["dense"]["kernel"])).any()
    with pytest.raises(FloatingPointError, match=naming("norm nan")):
        gtp.train.check_finite(metrics)


def test_an_unknown_check_is_refused():
    with pytest.raises(
        ValueError, match="`skip_nonfinite` is 'gradients'; it must be `True`, .* 'loss', .* or `False`"
    ):
        gtp.train_step(loss, optax.adamw(1e-2), skip_nonfinite="gradients")  # pyright: ignore[reportArgumentType]


def dense(rngs):
    return gtp.Dense(WIDTH, WIDTH, dtype=jnp.float32, rngs=rngs)


NUMBERS = [np.float32(np.nan), np.float32(-3), np.int32(-3)]


@pytest.mark.parametrize("number, view", pairwise(NUMBERS, ["global", "local"], usual=2))
def test_a_step_is_skipped_if_its_number_of_tokens_is_nan_or_negative(number, view):
    x, optimizer = make_batch()["x"], optax.sgd(1e-2)

    def loss(model, x):
        return jnp.sum(model(x) ** 2), jnp.asarray(number)

    with jax.set_mesh(gtp.make_mesh(gtp=4, devices=jax.devices()[:4])):
        state = gtp.TrainState.create(placed(dense), optimizer)
        before = host(state)
        state, metrics = gtp.train_step(loss, optimizer, view=view)(state, x)
        assert_equal(state, before)
        mean, gradients = jax.jit(lambda s, x: gtp.train.loss_and_gradients(loss, s, x, view=view))(state, x)
    assert metrics["skipped"] and np.isnan([metrics["loss"], metrics["grad_norm"], mean]).all()
    assert np.isnan(gradients["kernel"]).all()


def test_a_loss_that_raises_leaves_the_state_alive():
    def broken(model, x):
        model(x)
        raise KeyError("labels")

    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        state = gtp.TrainState.create(placed(dense), optax.sgd(1e-2))
        before = host(state)
        with pytest.raises(KeyError, match="labels"):
            gtp.train_step(broken, optax.sgd(1e-2))(state, make_batch()["x"])
        assert_equal(state, before)


def test_a_loop_in_which_every_step_is_skipped_is_warned_once():
    def loss(model, batch):
        return jnp.mean(model(batch)) * jnp.nan

    optimizer, x = optax.sgd(0.1), np.ones((4, WIDTH), np.float32)
    state = gtp.TrainState.create(placed(lambda rngs: gtp.Dense(WIDTH, WIDTH, rngs=rngs)), optimizer)
    step = gtp.train_step(loss, optimizer)

    def warned(count, **options):
        nonlocal state
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(count):
                state, metrics = step(state, x, **options)
                jax.block_until_ready(metrics)
        return [str(one.message) for one in found if "skipped" in str(one.message)]

    assert warned(20, skip=True) == [] == warned(9)
    assert re.search(naming("10 steps skipped gtp_jax.train.diagnose gtp_jax.train.check_finite"), *warned(3))
    assert warned(20) == []
