"""Quantized weights after a restore are those from before it, on every device; another recipe may take over."""

import secrets

import jax
import numpy as np
import pytest
from messages import naming

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.recipes import EXCLUDED

from .meshes import OPTIMIZERS, PLACES
from .runs import RECIPES, Run


@pytest.fixture
def scattered():
    """`scattered(run, seed)`: a state whose weights have their largest value anywhere, also in the last shard."""

    def make(run, seed):
        rng = np.random.default_rng(seed)

        def values(leaf):
            host = rng.standard_t(3, leaf.shape).astype(leaf.dtype) if leaf.ndim else np.zeros((), leaf.dtype)
            return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: host[index])

        return jax.tree.map(values, run.shapes())

    return make


def amax_oracle(params) -> list[float]:
    """The largest magnitude of every matrix between embedding and head, in numpy."""
    stacks = [np.abs(leaf) for leaf in jax.tree.leaves(params) if leaf.ndim == 3]
    return sorted(float(x) for stack in stacks for x in stack.max(axis=(1, 2)))


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("fp8", "mxfp8", "nvfp4_1d")]


@pytest.mark.parametrize("name", ["nvfp4", *SLOW])
def test_codes_and_amaxes_are_equal_on_all_replicas_and_to_those_before(tmp_path, scattered, name):
    seed = secrets.randbits(31)
    run = Run(PLACES["hsdp_tp2"], RECIPES[name], OPTIMIZERS["adamw"])
    state = scattered(run, seed)
    buffers, amaxes = run.wire(state)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, recipe=run.recipe)
        restored, _ = checkpoints.restore(run.shapes())
    again, amaxes_again = run.wire(restored)
    assert buffers and (name == "mxfp8") == (not amaxes)
    for before, after in zip((*buffers, *amaxes), (*again, *amaxes_again), strict=True):
        assert before.tobytes() == after.tobytes(), seed
        assert (after == after[:1]).all(), f"replicas differ, seed {seed}"
    whole, _ = checkpoints.restore(PLACES["one_device"].state(run.optimizer))
    for amax in amaxes_again:
        assert (amax == amax[:1, :1, :1]).all(), "the amax of a shard, not of the weight"
    if amaxes_again:
        assert sorted(x for amax in amaxes_again for x in amax[0, 0, 0].ravel().tolist()) == amax_oracle(whole.params)


@pytest.mark.slow
def test_another_recipe_takes_over(tmp_path):
    before = Run(PLACES["hsdp_tp2"], RECIPES["nvfp4"], OPTIMIZERS["adamw"])
    state = before.begin(seed=secrets.randbits(31))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, recipe=before.recipe)
        found = checkpoints.manifest()["recipe"]
        wanted = {"name": "NVFP4", "exclude": list(EXCLUDED), "grad_wire": None, "block": [16, 16]}
        assert wanted.items() <= found.items()
        losses = {}
        for name in ("nvfp4", "mxfp8"):
            run = Run(before.place, RECIPES[name], before.optimizer)
            losses[name] = run.loss(state)
            restored, _ = checkpoints.restore(run.shapes())
            assert run.loss(restored) == losses[name]
        assert losses["nvfp4"] != losses["mxfp8"]
        one = Run(PLACES["one_device"], RECIPES["mxfp8"], before.optimizer)
        restored, _ = checkpoints.restore(one.shapes())
        np.testing.assert_allclose(one.loss(restored), losses["mxfp8"], rtol=1e-6)


def test_a_recipe_that_is_none_is_refused(tmp_path, plain):
    with pytest.raises(TypeError, match=naming("`recipe` 'nvfp4' gtp_jax.recipes.BF16")):
        Checkpoints(tmp_path).save(1, plain({"w": jax.numpy.ones(2)}), recipe="nvfp4")
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, plain({"w": jax.numpy.ones(2)}))
        assert checkpoints.manifest()["recipe"] is None
        checkpoints.save(2, plain({"w": jax.numpy.ones(2)}), recipe=gtp.recipes.BF16(exclude=()))
        wanted = dict(
            name="BF16", exclude=[], high_precision_first=0, high_precision_last=0, override={}, grad_wire=None
        )
        assert checkpoints.manifest()["recipe"] == wanted
