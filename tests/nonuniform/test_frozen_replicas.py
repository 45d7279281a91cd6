"""Frozen weights in replicas of unequal degree: placed once, bit for bit, and trained around as on one device."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import naming

import gtp_jax as gtp
from gtp_jax.mesh import axes_of
from gtp_jax.nonuniform import FrozenWeights, Transfer

from .test_nonuniform_step import assert_close, begin, bits, train
from .unequal import OPTIMIZER, VOCAB, WIDE, Everything, Tiny, adapted_codes, batches, loss, with_b

FOUR_AND_THREE = dict(dp=2, tp=4, failed=(5,), batch=14)
TWO_AND_ONE = dict(dp=2, tp=2, failed=(3,), batch=9)
GTP_2 = dict(dp=2, gtp=2, tp=2, failed=(4, 6), batch=12, microbatches=2)


def frozen(rngs, *, of=Everything, recipe=None, trained=("mlp",)):
    """A model of which only these modules are trained."""
    filters = [nnx.PathContains(name) for name in trained]
    return gtp.nn.freeze(of(rngs), recipe, trained=nnx.Any(*filters))


def adapted(rngs, *, of=WIDE, recipe=None, **options):
    """A frozen model with adapters that already add something."""
    return with_b(gtp.nn.lora(of(rngs), 3, 6, recipe=recipe, rngs=rngs, **options))


CASES = {
    "most of a model, of every kind of leaf": (frozen, FOUR_AND_THREE),
    "the tied table as codes": (partial(frozen, of=Tiny, recipe=gtp.FP8(exclude=())), FOUR_AND_THREE),
    "all but a tied table": (partial(frozen, of=WIDE, recipe=gtp.NVFP4(), trained=["embed", "head"]), TWO_AND_ONE),
    "adapters on MXFP8, gtp 2": (partial(adapted, recipe=gtp.MXFP8()), GTP_2),
    "adapters on FP8, one amax per expert": (
        partial(adapted, of=partial(Everything, experts="expert"), recipe=gtp.FP8(), targets=["mlp"]),
        FOUR_AND_THREE,
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_steps_around_frozen_weights_are_those_of_one_device(name, x64):
    make, degrees = CASES[name]
    plan = gtp.nonuniform.plan_faults(**degrees)
    data = list(batches(plan.batch))[:3]
    devices = jax.devices()[: plan.slots]
    options = dict(microbatches=plan.microbatches)
    wanted = train(make, loss, data, **options)
    found = train(make, loss, data, plan=plan, devices=devices, **options)
    assert all(np.any(gradient) for gradient in wanted["gradient"].values())
    assert_close(found, wanted)


CODED = adapted_codes


def placed(make=CODED, degrees=TWO_AND_ONE, loss=loss):
    """Replicas, a state on their core, and a step."""
    replicas = gtp.nonuniform.Replicas(make, gtp.nonuniform.plan_faults(**degrees), jax.devices()[:4])
    with jax.set_mesh(replicas.core):
        return replicas, begin(make), gtp.train_step(loss, OPTIMIZER, view="local", replicas=replicas)


@pytest.fixture
def moves(monkeypatch):
    """The names of the transfers that run, one per replica."""
    found, call = [], Transfer.__call__

    def counted(self, parts):
        found.append(self.name)
        return call(self, parts)

    monkeypatch.setattr(Transfer, "__call__", counted)
    return found


@pytest.mark.full
def test_codes_are_moved_once_per_state_and_states_may_take_turns_in_one_step(moves, x64):
    """A step must not go on with the frozen weights of the state before."""
    replicas, state, step = placed()
    losses, batch = {}, next(batches(9))
    with jax.set_mesh(gtp.make_mesh(devices=jax.devices()[:1])):
        for seed in (3, 4):
            total, tokens = jax.jit(lambda state: loss(state.model(), batch))(begin(CODED, seed=seed))
            losses[seed] = float(total / tokens)
    with jax.set_mesh(replicas.core):
        again, before = jax.tree.map(jnp.copy, state), bits(state.frozen)
        for seed, one in ((3, state), (4, begin(CODED, seed=4)), (3, again)):
            after, metrics = step(one, batch)
            np.testing.assert_allclose(float(metrics["loss"]), losses[seed], rtol=1e-12)
        assert abs(losses[3] - losses[4]) > 1e-6
        del moves[:]
        for _ in range(3):
            after, _ = step(after, batch)
    assert [moves.count(name) for name in ("unfold_frozen", "unfold", "fold")] == [0, 6, 6]
    assert bits(after.frozen) == before
    with jax.set_mesh(replicas.core), pytest.raises(ValueError, match=naming("frozen weights format `replicas`")):
        step(begin(partial(adapted, recipe=gtp.MXFP8())), batch)


IN_TILES = partial(adapted, of=partial(Tiny, features=256, hidden=256), recipe=gtp.recipes.FP8Blocks())


@pytest.mark.parametrize("make, form", [(CODED, "NVFP4"), pytest.param(IN_TILES, "FP8_BLOCKS", marks=pytest.mark.full)])
def test_every_replica_has_the_bits_of_the_core_in_its_own_layout(make, form, x64):
    replicas, state, _ = placed(make, degrees=FOUR_AND_THREE | {"tp": 2, "failed": (3,)})
    frozen = FrozenWeights(replicas)
    for tree, shapes, mesh in zip(frozen(state), frozen.shapes(state), replicas.meshes, strict=True):
        assert bits(tree) == bits(state.frozen)
        for found, shape in zip(jax.tree.leaves(tree), jax.tree.leaves(shapes), strict=True):
            assert (found.shape, found.dtype, found.sharding) == (shape.shape, shape.dtype, shape.sharding)
            assert found.sharding.mesh == mesh
    (codes,) = {leaf.dtype for leaf in jax.tree.leaves(state.frozen["mlp"]["down"]["kernel"])} - {np.dtype("float32")}
    assert codes == np.uint8 and state.frozen["mlp"]["down"]["kernel"].format.name == form


class Stock(nnx.Module):
    """Flax layers, whose weights `gtp_jax.shard` divides over dp and gtp, frozen or not."""

    def __init__(self, rngs):
        shared = dict(param_dtype="float64", dtype="float64", rngs=rngs)
        self.embed = nnx.Embed(VOCAB, 32, **shared)
        self.up, self.down = nnx.Linear(32, 64, **shared), nnx.Linear(64, 32, **shared)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.embed.attend(x + self.down(jax.nn.gelu(self.up(x))))


@pytest.mark.slow
def test_frozen_weights_that_replicas_divide_are_gathered_first(moves, x64):
    def make(rngs):
        return adapted(rngs, of=lambda rngs: gtp.shard(Stock(rngs), nnx.Linear, min_size=64))

    replicas, state, _ = placed(make)
    assert "dp" in {axis for leaf in jax.tree.leaves(state.frozen) for axis in axes_of(leaf.sharding.spec)}
    data = list(batches(9))[:3]
    found = train(make, loss, data, plan=replicas.plan, devices=jax.devices()[:4])
    assert moves.count("unfold_frozen") == 2
    assert_close(found, train(make, loss, data))
