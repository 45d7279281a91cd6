"""What TransformerEngine tests of its distributed checkpoints (PyTorch's DCP; its #2713), with no tolerance.

Ten Adam steps, a save, ten more, on its three meshes with weights in its five formats; two steps with each of its five
recipes, on the same mesh and on another; the output and the next step of a fresh model, saved in the foreground and in
the background; half as many devices. Where upstream allows 0.05 or 0.1, or skips a format, every bit is compared. There
are also optimizers whose state has other shapes than the parameters.
"""

import secrets

import jax
import numpy as np
import pytest

from gtp_jax.checkpoint import Checkpoints

from .meshes import OPTIMIZERS, PLACES, Place
from .runs import ORIGINALS, RECIPES, Run

UPSTREAM_MESHES = ("fsdp", "hsdp", "hsdp_tp2")
MATRIX = [(mesh, recipe, "adamw") for mesh in UPSTREAM_MESHES for recipe in RECIPES] + [
    ("hsdp_tp2", recipe, optimizer) for recipe in ("bf16", "nvfp4") for optimizer in ("adafactor", "muon")
]


def bits(state) -> list[bytes]:
    """Every device's part of every array."""
    return [np.asarray(shard.data).tobytes() for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "recipe", "optimizer"), MATRIX)
def test_ten_steps_after_a_restore_are_the_ten_after_the_save(tmp_path, mesh, recipe, optimizer):
    run = Run(PLACES[mesh], RECIPES[recipe], OPTIMIZERS[optimizer])
    state = run.begin(seed=secrets.randbits(31))
    # with the definition of this model, for which its step is compiled already
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    state, _ = run.go_on(state, 10)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(10, state, recipe=run.recipe)
        saved = bits(state)
        before = [np.array(leaf, copy=True) for leaf in jax.tree.leaves(state.params)]
        later, wanted = run.go_on(state, 10)
        for leaf, old in zip(jax.tree.leaves(later.params), before, strict=True):
            assert (np.asarray(leaf) != old).any(), "weights did not move"
        restored, _ = checkpoints.restore(shapes)
    assert bits(restored) == saved
    again, found = run.go_on(restored, 10)
    assert found == wanted and len(set(wanted)) == 10
    assert bits(again) == bits(later)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ORIGINALS)
def test_two_steps_with_an_original_recipe_are_the_same_bits_on_either_mesh(tmp_path, recipe):
    here, there = (Run(PLACES[mesh], ORIGINALS[recipe], OPTIMIZERS["adamw"]) for mesh in ("hsdp", "fsdp"))
    state, _ = here.go_on(here.begin(seed=secrets.randbits(31)), 2)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state, recipe=here.recipe)
        for run in (here, there):
            shapes = run.shapes()
            restored, _ = checkpoints.restore(shapes)
            places = [leaf.sharding for leaf in jax.tree.leaves(shapes)]
            whole = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
            moved = jax.tree.unflatten(jax.tree.structure(shapes), map(jax.device_put, whole, places))
            assert bits(restored) == bits(moved)
            (later, wanted), (again, found) = run.go_on(moved, 2), run.go_on(restored, 2)
            assert found == wanted
            assert bits(again) == bits(later)


@pytest.mark.slow
@pytest.mark.parametrize("wait", [True, False], ids=["sync", "async"])
def test_a_fresh_model_gives_the_saved_ones_output_and_next_step(tmp_path, wait):
    run = Run(PLACES["fsdp"], RECIPES["fp8"], OPTIMIZERS["adamw"])
    state, _ = run.go_on(run.begin(seed=1), 2)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state)
        if wait:
            checkpoints.wait()
        output = run.loss(state)
        _, step = run.go_on(state, 1)  # consumes the state, perhaps while it is written
        fresh = run.begin(seed=2)
        assert run.loss(fresh) != output
        restored, _ = checkpoints.restore(fresh)
    assert run.loss(restored) == output
    assert run.go_on(restored, 1)[1] == step


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_half_as_many_devices_go_on_with_the_same_bits(tmp_path, logical, assert_same_bits, recipe):
    four, two = (Run(Place({"gtp": n}), RECIPES[recipe], OPTIMIZERS["adamw"]) for n in (4, 2))
    state, _ = four.go_on(four.begin(seed=secrets.randbits(31)), 2)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state, recipe=four.recipe)
        restored, _ = checkpoints.restore(two.shapes())
    assert_same_bits(logical(restored), logical(state))
    (_, [(loss, norm)]), (_, [(wanted, norm_wanted)]) = two.go_on(restored, 1), four.go_on(state, 1)
    np.testing.assert_allclose([loss, norm], [wanted, norm_wanted], rtol=1e-5)
