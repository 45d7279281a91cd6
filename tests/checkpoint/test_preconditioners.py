"""Square preconditioners that look like a padded weight are not taken for one."""

import itertools

import jax
import numpy as np
import pytest

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.mesh import Layout, in_memory, on_disk

from .meshes import OPTIMIZERS, PLACES
from .runs import Run


def test_what_is_kept_beside_a_weight_is_what_comes_back_and_no_two_are_kept_alike():
    layout = Layout((120, 128), 0, None, gtp=8)
    assert layout.physical_shape == (128, 128)
    ends = [(120, 128), (120, 120), (128, 128), (128, 128, 1), (120, 128, 1), (128,), (1,), ()]
    kept = {}
    for end, lead in itertools.product(ends, [(), (2,), (128,), (1, 128)]):
        logical = np.random.default_rng(len(kept)).standard_normal((*lead, *end))
        found = in_memory(layout, jax.numpy.asarray(logical))
        np.testing.assert_array_equal(on_disk(layout, found), logical.astype(found.dtype))
        assert kept.setdefault(found.shape, logical.shape) == logical.shape


def test_a_preconditioner_of_a_weights_physical_shape_is_saved_whole(tmp_path):
    place = PLACES["fsdp"]
    like = place.state(OPTIMIZERS["shampoo"])
    gate = like.params["blocks"]["layers"]["mlp"]["up"]["kernel"]["gate"]
    left = like.opt_state.left["blocks"]["layers"]["mlp"]["up"]["kernel"]["gate"]
    assert gate.shape == (2, 128, 128) and left.shape == (2, 128, 128, 1), "the shapes no longer collide"
    ones = jax.tree.map(
        lambda leaf: jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda index: np.ones(leaf.shape, leaf.dtype)[index]
        ),
        like,
    )
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, ones)
        for name in ("fsdp", "one_device"):
            restored, _ = checkpoints.restore(PLACES[name].state(OPTIMIZERS["shampoo"]))
            for leaf in jax.tree.leaves(restored.opt_state):
                assert (np.asarray(leaf) == 1).all(), (name, leaf.shape)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp", "hsdp_tp2"])
def test_preconditioned_steps_on_padded_weights_are_those_on_one_device(mesh):
    seen = []
    for name in (mesh, "one_device"):
        run = Run(PLACES[name], gtp.BF16(), OPTIMIZERS["shampoo"])
        seen.append(run.go_on(run.begin(seed=3), 2)[1])
    np.testing.assert_allclose(seen[0], seen[1], rtol=1e-3)
