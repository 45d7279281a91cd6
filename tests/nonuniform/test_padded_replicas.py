"""Replicas of unequal degree whose weights are stored padded train as one device does; padding does not move."""

from __future__ import annotations

import contextlib
import functools
import warnings

import jax
import numpy as np
import optax
import pytest

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints

from ..gradients import keeps_gradient
from .test_nonuniform_step import assert_close, assert_replicas_agree, begin, named, train
from .unequal import Everything, Tiny, batches, loss, with_b

FOUR_AND_THREE = dict(dp=2, tp=4, failed=(5,), batch=14)
TWO_AND_ONE = dict(dp=2, gtp=2, tp=2, failed=(1,), batch=12)
# 25 features, 19 hidden ones, 37 tokens: 2, 3 and 4 divide none of them
ODD = functools.partial(Tiny, features=25)
ALL_ODD = functools.partial(Everything, features=25)


def frozen_codes(rngs, recipe):
    """Adapters on codes, which are padded at both degrees of a rank."""
    return with_b(gtp.nn.lora(ODD(rngs), 3, 6, recipe=recipe, rngs=rngs))


@contextlib.contextmanager
def shared_evenly():
    with gtp.layout.even_shares(), warnings.catch_warnings():
        warnings.filterwarnings("error", "a weight of shape .* stays whole")
        yield


@pytest.fixture(autouse=True)
def even_shares():
    with shared_evenly():
        yield


def padded_on(plan, factory):
    """Replicas; and the padded shapes on the core and in each replica, by path."""
    replicas = gtp.nonuniform.Replicas(factory, plan, jax.devices()[: plan.slots])
    with jax.set_mesh(replicas.core):
        core = gtp.nn.split_model(gtp.nn.abstract_model(factory)).model_def
    each = [{path: one.array_shape for path, one in model.padded.items()} for model in (core, *replicas.model_defs)]
    return replicas, each


CASES = {
    "4 and 3": (ALL_ODD, FOUR_AND_THREE),
    "4 and 3, core of 2, two microbatches": (ODD, FOUR_AND_THREE | dict(core_tp=2, microbatches=2)),
    "gtp 2, 2 and 1": (ALL_ODD, TWO_AND_ONE),
}


def trained(make, degrees):
    """Five steps over replicas, and on one device."""
    plan = gtp.nonuniform.plan_faults(**degrees)
    _, padded = padded_on(plan, make)
    assert all(padded) and len({tuple(sorted(one.items())) for one in padded}) > 1, "each side pads in its own way"
    data, options = list(batches(plan.batch)), dict(microbatches=plan.microbatches)
    found = train(make, loss, data, plan=plan, devices=jax.devices()[: plan.slots], **options)
    return found, train(make, loss, data, **options)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_gradients_and_steps_of_every_kind_of_leaf_are_those_of_one_device(name, x64):
    found, wanted = trained(*CASES[name])
    assert_close(found, wanted)
    assert_replicas_agree(found)


@pytest.fixture(scope="module")
def four_and_three():
    with jax.enable_x64(True), shared_evenly():
        yield trained(ODD, FOUR_AND_THREE)


@pytest.mark.full
def test_gradients_and_steps_are_those_of_one_device(four_and_three):
    found, wanted = four_and_three
    assert_close(found, wanted)
    assert_replicas_agree(found)


@pytest.mark.full
def test_padding_is_zero_on_the_core_and_in_replicas_after_steps(four_and_three, x64):
    state, step, core = (four_and_three[0][name] for name in ("state", "step", "mesh"))
    with jax.set_mesh(core):
        logical, seen = state.logical(), 0
        for side in (state.params, *step.weights(state)):
            for stored, own in zip(jax.tree.leaves(side), jax.tree.leaves(logical.params), strict=True):
                outside = np.ones(stored.shape, bool)
                outside[tuple(map(slice, own.shape))] = False
                assert not np.asarray(stored)[outside].any()
                seen += outside.sum()
        moments = jax.tree.leaves(jax.tree.map(np.count_nonzero, (state.opt_state, logical.opt_state)))
        assert moments[: len(moments) // 2] == moments[len(moments) // 2 :]
    assert seen


@pytest.mark.full
def test_checkpoints_move_between_padded_replicas_and_one_device_bit_for_bit(four_and_three, tmp_path, x64):
    state, wanted = four_and_three[0]["state"], four_and_three[0]["end"]
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        with jax.set_mesh(gtp.make_mesh(gtp=1, devices=jax.devices()[:1])):
            found, _ = checkpoints.restore(begin(ODD, seed=4))
            for name, leaf in named(found.params).items():
                np.testing.assert_array_equal(leaf, wanted[name], err_msg=name)


@pytest.mark.full
def test_an_optimizer_that_reads_whole_arrays_gets_logical_ones(x64):
    data, optimizer = list(batches(14))[:3], keeps_gradient(optax.adafactor(1e-2, min_dim_size_to_factor=8))
    wanted = train(ODD, loss, data, optimizer=optimizer)
    found = train(ODD, loss, data, plan=gtp.nonuniform.plan_faults(**FOUR_AND_THREE), optimizer=optimizer)
    assert_close(found, wanted)


@pytest.mark.full
def test_adapters_on_padded_codes_train_as_on_one_device(x64):
    make = functools.partial(frozen_codes, recipe=gtp.NVFP4(block=(1, 16), exclude=("embed", "*down")))
    data = list(batches(12))[:3]
    plan = gtp.nonuniform.plan_faults(**TWO_AND_ONE)
    _, padded = padded_on(plan, make)
    assert any("codes" in path for path in padded[1])
    wanted = train(make, loss, data)
    found = train(make, loss, data, plan=plan)
    assert_close(found, wanted)


@pytest.mark.slow
def test_gradients_of_padded_weights_travel_as_codes_in_whole_blocks():
    """At degrees 4 and 3, devices store no whole blocks of 32 of 100 hidden features, so blocks run along the 64
    others, whichever dimension these are."""
    make = functools.partial(Tiny, features=64, hidden=100, dtype="float32")
    plan, data = gtp.nonuniform.plan_faults(**FOUR_AND_THREE), list(batches(14))[:2]
    replicas, _ = padded_on(plan, make)
    with jax.set_mesh(replicas.core):
        recipe = gtp.recipes.BF16(grad_wire="mxfp8")
        step = gtp.train_step(loss, optax.sgd(1e-2), view="local", replicas=replicas, recipe=recipe)
        moved = step.transfers(begin(make, optax.sgd(1e-2)))[0]["fold"].moves
    coded = {leaf.shape for leaf in moved.leaves if leaf.dtype == np.uint8}
    assert coded == {(64, 100), (2, 100), (100, 64), (100, 2)}, "codes and scales of gate and up, and of down"
    found = {name: train(make, loss, data, plan=plan, recipe=own) for name, own in (("", None), ("codes", recipe))}
    assert_replicas_agree(found["codes"], steps=len(data))
    for name, leaf in found[""]["gradient"].items():
        error = np.linalg.norm(found["codes"]["gradient"][name] - leaf) / np.linalg.norm(leaf)
        assert (1e-3 < error < 0.06) if ".kernel" in name else error < 1e-5, f"{name}: {error:.1e}"
