"""Gradients that travel as MXFP8 codes between replicas of unequal degree: rounded once, and summed in float32."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gtp_jax as gtp
from gtp_jax.hlo import collectives

from .test_nonuniform_step import begin, bits, train
from .unequal import OPTIMIZER, WIDE, Tiny, batches, loss

RECIPE = gtp.recipes.BF16(grad_wire="mxfp8")
PLANS = {
    "2 and 1": dict(dp=2, tp=2, failed=(3,), batch=9),
    "4 and 2": dict(dp=2, tp=4, failed=(4, 6), batch=12),
    "gtp 2, 2 and 1": dict(dp=2, gtp=2, tp=2, failed=(1,), batch=12),
}
CODED = {"mlp.up.kernel.gate", "mlp.up.kernel.up", "mlp.down.kernel"}


def run(plan, data, recipe, make=WIDE, **options):
    return train(make, loss, data, plan=plan, devices=jax.devices()[: plan.slots], recipe=recipe, **options)


def sum_of(found):
    """The gradient of the first step, a sum over all tokens."""
    return {name: leaf * found["tokens"] for name, leaf in found["gradient"].items()}


def rounded(x):
    return np.asarray(gtp.ops.dequantize(gtp.ops.quantize(jnp.asarray(x, jnp.float32), gtp.formats.MXFP8), "float32"))


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_each_replica_rounds_its_gradient_once(name, x64):
    plan = gtp.nonuniform.plan_faults(**PLANS[name])
    (batch,) = list(batches(plan.batch))[:1]
    options = dict(max_grad_norm=None)
    alone = []
    for replica in plan.replicas:  # with tokens of weight 0 elsewhere, the gradient is that of one replica
        weights = np.zeros_like(batch["weights"])
        weights[slice(*replica.rows)] = batch["weights"][slice(*replica.rows)]
        alone.append(sum_of(run(plan, [batch | {"weights": weights}], None, **options)))
    found = sum_of(run(plan, [batch], RECIPE, **options))
    for leaf, value in found.items():
        exact = sum(one[leaf] for one in alone)
        if leaf in CODED and plan.gtp == 1:  # within a replica of gtp 2, ranks have exchanged codes before
            wanted = sum(rounded(one[leaf]) for one in alone)
            np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6 * np.abs(wanted).max())
        error = np.linalg.norm(value - exact) / np.linalg.norm(exact)
        assert (1e-3 < error < 0.06) if leaf in CODED else error < 1e-12, f"{leaf}: {error:.1e}"


@pytest.mark.slow
def test_where_blocks_would_be_cut_gradients_travel_as_without(x64):
    """24 features and 20 hidden ones are no whole blocks of 32; tp 2 divides them, so that no ranks exchange codes."""
    make = functools.partial(Tiny, hidden=20)
    plan, data = gtp.nonuniform.plan_faults(**PLANS["2 and 1"]), list(batches(9))[:2]
    found, wanted = (run(plan, data, recipe, make) for recipe in (RECIPE, gtp.recipes.BF16()))
    assert bits(found["state"]) == bits(wanted["state"])


@pytest.mark.full
def test_codes_are_what_travels(x64):
    found = {}
    for recipe in (None, RECIPE):
        replicas = gtp.nonuniform.Replicas(WIDE, gtp.nonuniform.plan_faults(**PLANS["2 and 1"]), jax.devices()[:4])
        step = gtp.train_step(loss, OPTIMIZER, view="local", replicas=replicas, recipe=recipe)
        with jax.set_mesh(replicas.core):
            state = begin(WIDE)
            programs = step.compile(state, next(batches(9)))
            moves = step.transfers(state)[0]["fold"].moves
        folds = collectives(programs["fold 0"].as_text() or "")
        assert sum(c.operand_bytes for c in folds) == moves.bytes_in_turn
        found[recipe] = moves.bytes_in_turn, collectives(programs["update"].as_text() or "")
    (wide, _), (narrow, update) = found.values()
    kernels = 3 * 128 * 128  # of which the replica of tp 2 sends half; the rest travels in float64 as before
    assert wide - narrow == kernels // 2 * (8 - 1 - 1 / 32)
    sent = sum(c.operand_bytes for c in update if c.kind == "all-to-all")
    assert sent == kernels * (1 + 1 / 32)


@pytest.mark.full
def test_a_step_compiled_under_one_recipe_runs_under_others(x64):
    replicas = gtp.nonuniform.Replicas(WIDE, gtp.nonuniform.plan_faults(**PLANS["2 and 1"]), jax.devices()[:4])
    found = {}
    with jax.set_mesh(replicas.core):
        for compiled in (False, True):
            state, step = begin(WIDE), gtp.train_step(loss, OPTIMIZER, view="local", replicas=replicas)
            for number, (recipe, batch) in enumerate(zip((None, RECIPE, None), batches(9), strict=False)):
                with gtp.use_recipe(recipe):
                    if compiled and number == 0:
                        step.compile(state, batch)
                    state, _ = step(state, batch)
            found[compiled] = bits(state.params)
    assert found[True] == found[False]


@jax.custom_vjp
def spoiled(kernel, spoil):
    """0, with a gradient whose first element is Inf if asked."""
    return jnp.zeros(())


def _spoiled_fwd(kernel, spoil):
    return jnp.zeros(()), (kernel, spoil)


def _spoiled_bwd(saved, gradient):
    kernel, spoil = saved
    return jnp.zeros_like(kernel).at[0, 0].set(jnp.where(spoil > 0, jnp.inf, 0)), jnp.zeros_like(spoil)


spoiled.defvjp(_spoiled_fwd, _spoiled_bwd)


def test_a_gradient_that_is_not_finite_skips_the_step(x64):
    """Only one gradient of one replica is spoiled, and its codes must not hide that."""

    def sometimes_spoiled(model, batch):
        total, tokens = loss(model, batch)
        return total + spoiled(model.mlp.down.kernel[...], batch["spoil"].max()), tokens

    replicas = gtp.nonuniform.Replicas(WIDE, gtp.nonuniform.plan_faults(**PLANS["2 and 1"]), jax.devices()[:4])
    step = gtp.train_step(sometimes_spoiled, OPTIMIZER, view="local", replicas=replicas, recipe=RECIPE)
    batch = next(batches(9))
    with jax.set_mesh(replicas.core):
        state = begin(WIDE)
        before = bits(state)
        for last, skipped in ((1.0, True), (0.0, False)):
            state, metrics = step(state, batch | {"spoil": np.array([0.0] * 8 + [last])})
            assert bool(metrics["skipped"]) == skipped and np.isfinite(float(metrics["loss"]))
            assert (bits(state) == before) == skipped
