"""Dropout of adapters in replicas of unequal degree: the masks of a step, read from the gradient."""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.mesh import degree

from ..gradients import keeps_gradient
from .unequal import with_b

POSITIONS, FEATURES, RATE, SCALE = 48, 64, 0.375, 2.0
OPTIMIZER = keeps_gradient(optax.sgd(0.0))  # nothing changes but the number of updates made
F64 = dict(dtype="float64", param_dtype="float64")

pytestmark = pytest.mark.usefixtures("x64")


class Probe(nnx.Module):
    """An embedding of powers of two, so that a sum over positions tells which were added, and a layer."""

    def __init__(self, rngs):
        self.embed = gtp.Embed(POSITIONS, FEATURES, rngs=rngs, **F64)
        self.embed.table.set_value(jnp.broadcast_to(2.0 ** jnp.arange(POSITIONS)[:, None], (POSITIONS, FEATURES)))
        self.dense = gtp.Dense(FEATURES, 48, parallel="column", rngs=rngs, **F64)

    def __call__(self, tokens):
        return self.dense(self.embed(tokens))


def adapted(rngs):
    return with_b(gtp.nn.lora(Probe(rngs), 1, SCALE, dropout=RATE, rngs=rngs))


def total(model, batch):
    """The sum of all outputs, of which a rank of tp has its own features."""
    return model(batch["tokens"]).sum() * degree("tp"), batch["weights"].sum()


def start(make, plan, *, loss=total, **options):
    """The core's mesh, a state on it, and a step."""
    replicas = gtp.nonuniform.Replicas(make, plan, jax.devices()[: plan.slots])
    with jax.set_mesh(replicas.core):
        state = gtp.TrainState.create(gtp.init(make, nnx.Rngs(3)), OPTIMIZER)
        return replicas.core, state, gtp.train_step(loss, OPTIMIZER, view="local", replicas=replicas, **options)


def numbered(rows, length):
    return {
        "tokens": np.arange(rows * length, dtype=np.int32).reshape(rows, length),
        "weights": np.ones((rows, length), np.int32),
    }


def masks_of(state, rows, length):
    """What each position kept of its features in the last step, `(rows * length, features)`."""
    gradient, params = (tree["dense"]["lora"] for tree in (state.opt_state[0], state.params))
    of_one = SCALE * np.asarray(params["b"]).sum() / (1 - RATE) / (rows * length)
    added = np.asarray(gradient["a"])[:, 0] / of_one
    sums = np.rint(added)
    np.testing.assert_allclose(added, sums, rtol=1e-13)  # only if every rank of tp has dropped the same
    return sums.astype(np.int64) >> np.arange(rows * length)[:, None] & 1


LENGTH = 4
PLANS = {
    "4 and 3": dict(dp=2, tp=4, failed=(5,), batch=7),
    "2 and 1": dict(dp=2, tp=2, failed=(3,), batch=9),
    "gtp 2, 2 and 1, two microbatches": dict(dp=2, gtp=2, tp=2, failed=(4, 6), batch=12, microbatches=2),
}


@pytest.mark.full
@pytest.mark.parametrize("name", PLANS)
def test_no_two_positions_of_a_batch_have_the_same_mask_in_any_step(name):
    plan = gtp.nonuniform.plan_faults(**PLANS[name])
    mesh, state, step = start(adapted, plan, microbatches=plan.microbatches)
    found = []
    with jax.set_mesh(mesh):
        for _ in range(2):
            state, _ = step(state, numbered(plan.batch, LENGTH))
            found.append(masks_of(state, plan.batch, LENGTH))
    masks = np.concatenate(found)
    assert len(np.unique(masks, axis=0)) == len(masks) == 2 * plan.batch * LENGTH
    assert abs(masks.mean() - (1 - RATE)) < 4 * np.sqrt(RATE * (1 - RATE) / masks.size)


@pytest.mark.full
def test_a_run_that_is_resumed_drops_what_it_would_have_dropped(tmp_path):
    plan = gtp.nonuniform.plan_faults(**PLANS["2 and 1"])
    mesh, state, step = start(adapted, plan)
    batch, sizes = numbered(plan.batch, LENGTH), (plan.batch, LENGTH)
    with jax.set_mesh(mesh), Checkpoints(tmp_path) as checkpoints:
        state, _ = step(state, batch)
        checkpoints.save(1, state)
        checkpoints.wait()
        state, _ = step(state, batch)
        wanted = masks_of(state, *sizes)
    mesh, state, step = start(adapted, plan)  # a new process knows only the checkpoint
    with jax.set_mesh(mesh), Checkpoints(tmp_path, read_only=True) as checkpoints:
        state, _ = step(checkpoints.restore(state)[0], batch)
        np.testing.assert_array_equal(masks_of(state, *sizes), wanted)
    mesh, other, step = start(adapted, plan, seed=1)
    with jax.set_mesh(mesh), Checkpoints(tmp_path, read_only=True) as checkpoints:
        other, _ = step(checkpoints.restore(other)[0], batch)
        assert np.mean(masks_of(other, *sizes) == wanted) < 0.7


class Linear(nnx.Module):
    """Layers that are computed again in backward; the sum of outputs is linear in each matrix of the last one."""

    def __init__(self, rngs):
        def layer(rngs):
            return gtp.MLP(FEATURES, 48, gated=False, activation=lambda x: x, rngs=rngs, **F64)

        self.embed = gtp.Embed(POSITIONS, FEATURES, rngs=rngs, **F64)
        self.layers = gtp.Stack(layer, 2, remat="nothing", rngs=rngs)

    def __call__(self, tokens):
        return self.layers(self.embed(tokens))


def sum_of_outputs(model, batch):
    """The sum of all outputs, of which a rank of tp has its own positions, or all if tp does not divide them."""
    y = model(batch["tokens"])
    copies = degree("tp") if y.shape[1] < batch["tokens"].shape[1] else 1
    return y.sum() * copies, batch["weights"].sum()


def linear(rngs):
    return with_b(gtp.nn.lora(Linear(rngs), 3, SCALE, dropout=RATE, rngs=rngs))


@pytest.mark.slow
def test_forward_and_recomputation_drop_the_same():
    """A linear function is the product of its argument and its gradient."""
    plan = gtp.nonuniform.plan_faults(**PLANS["gtp 2, 2 and 1, two microbatches"])
    mesh, _, step = start(linear, plan, loss=sum_of_outputs, microbatches=plan.microbatches)

    def loss_without(*path):
        """The loss, and the state after the step, if the last layer's matrix at this path is replaced by 0."""
        state = start(linear, plan)[1]
        with jax.set_mesh(mesh):
            if path:
                node = at(state.params, *path)
                node["a"] = node["a"].at[-1].set(0)
            state, metrics = step(state, numbered(plan.batch, LENGTH))
        return float(metrics["loss"]), state

    whole, state = loss_without()
    for path in (("up", "lora", "up"), ("down", "lora")):
        matrix, gradient = (np.asarray(at(tree, *path)["a"])[-1] for tree in (state.params, state.opt_state[0]))
        share = whole - loss_without(*path)[0]
        assert abs(share) > 1e-3
        np.testing.assert_allclose(np.sum(matrix * gradient), share, rtol=1e-10)


def at(tree, *path):
    return functools.reduce(operator.getitem, ("layers", "layers", *path), tree)
