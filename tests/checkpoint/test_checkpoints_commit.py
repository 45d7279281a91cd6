"""A step is there whole or not at all; what was saved is what the state was when `save` returned."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from messages import naming

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints, _checkpoints
from gtp_jax.checkpoint._pruning import Pruning


@pytest.mark.parametrize(("keep", "left"), [(3, [3, 4, 5]), (None, [1, 2, 3, 4, 5])])
def test_the_last_n_are_kept(tmp_path, plain, keep, left):
    with Checkpoints(tmp_path, keep=keep) as earlier:
        earlier.save(1, plain({"w": jnp.full(3, 1)}))
    with Checkpoints(tmp_path, keep=keep) as checkpoints:
        for step in range(2, 6):
            checkpoints.save(step, plain({"w": jnp.full(3, step)}))
        checkpoints.wait()
        assert checkpoints.steps() == left
        assert checkpoints.latest() == 5
    assert sorted(os.listdir(tmp_path)) == [str(step) for step in left]
    for step in left:
        restored, _ = Checkpoints(tmp_path).restore(plain({"w": jnp.zeros(3, int)}), step=step)
        assert (restored.params["w"] == step).all()


def test_the_best_are_kept_beside_the_latest(tmp_path, plain):
    losses = [3.0, 1.0, float("nan"), 2.0, None, 5.0, 4.0]
    with Checkpoints(tmp_path, keep=2, keep_best=2) as checkpoints:
        for step, loss in enumerate(losses, 1):
            checkpoints.save(step, plain({"w": jnp.full(3, step)}), loss=loss)
        checkpoints.wait()
        assert checkpoints.steps() == [2, 4, 6, 7]
        assert (checkpoints.best(), checkpoints.latest()) == (2, 7)
    restored, _ = Checkpoints(tmp_path).restore(plain({"w": jnp.zeros(3, int)}), Checkpoints(tmp_path).best())
    assert (restored.params["w"] == 2).all()
    with pytest.raises(ValueError, match=naming("`keep_best` -1 whole")):
        Checkpoints(tmp_path, keep_best=-1)


def test_an_empty_or_missing_directory_has_no_steps(tmp_path):
    for directory in (tmp_path, tmp_path / "none"):
        assert Checkpoints(directory).steps() == []
        assert Checkpoints(directory).latest() is None
    assert not (tmp_path / "none").exists()


def overwrite(state):
    jax.block_until_ready(jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)(state))


def delete(state):
    for leaf in jax.tree.leaves(state):
        leaf.delete()


@pytest.mark.parametrize("destroy", [overwrite, pytest.param(delete, marks=pytest.mark.full)])
def test_buffers_may_be_donated_as_soon_as_save_returns(tmp_path, plain, filled, destroy):
    # 64 MiB, so that the writing goes on while the arrays are destroyed.
    sharding = NamedSharding(gtp.make_mesh(gtp=8), PartitionSpec("gtp"))
    like = plain({f"w{i}": jax.ShapeDtypeStruct((1024, 2048), jnp.float32, sharding=sharding) for i in range(8)})
    like = dataclasses.replace(like, step=like.params["w0"])
    state = filled(like, seed=1)
    before = jax.tree.map(lambda leaf: np.array(leaf, copy=True), state)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        assert checkpoints.latest() is None, "the save was over before the test began"
        destroy(state)
        filled(like, seed=2)  # takes the memory, were it free
        restored, _ = checkpoints.restore(like)
    for after, leaf in zip(jax.tree.leaves(restored), jax.tree.leaves(before), strict=True):
        assert np.asarray(after).tobytes() == leaf.tobytes()


def test_extra_may_be_changed_as_soon_as_save_returns(tmp_path, plain):
    state = plain({"w": jnp.ones((1024, 1024))})
    position = {"batches": 1, "of_files": {"a": [1]}}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, position)
        assert checkpoints.latest() is None, "the save was over before the test began"
        position["batches"] = 2
        position["of_files"]["a"].append(2)
    assert checkpoints.restore(state)[1] == {"batches": 1, "of_files": {"a": [1]}}


def test_half_written_steps_are_ignored_and_swept_at_the_next_save(tmp_path, plain):
    state = plain({"w": jnp.ones(3)})
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
    os.rename(tmp_path / "1", tmp_path / "2.orbax-checkpoint-tmp")
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state)
    assert os.listdir(tmp_path) == ["3"]


class PeerGone(Exception):
    """What a collective raises when another process has ended."""


@pytest.mark.parametrize("fails", ["for its digests", "while it is written"])
def test_a_save_that_fails_halfway_deletes_no_earlier_step(tmp_path, plain, monkeypatch, fails):
    state = plain({"w": jnp.ones(3)})
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        with monkeypatch.context() as patch:
            if fails == "for its digests":  # everything is written but the manifest, for which the background waits
                patch.setattr(_checkpoints.Digests, "result", raise_gone)
            else:  # the arrays are being written
                patch.setattr(ocp.CheckpointManager, "_get_old_steps_to_remove", raise_gone)
            with pytest.raises(PeerGone):
                checkpoints.save(2, state)
        assert checkpoints.steps() == [1]
        checkpoints.save(3, state)
        checkpoints.wait()
        assert checkpoints.steps() == [3]
    assert os.listdir(tmp_path) == ["3"]


def raise_gone(*_):
    raise PeerGone


def test_a_step_is_never_pruned_before_a_later_one_counts(tmp_path, plain):
    state = plain({"w": jnp.ones(3)})
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.save(2, state)
    pruning = Pruning(str(tmp_path), lambda: None)
    pruning.delete_steps([1, 2])
    assert checkpoints.steps() == [2]


def test_reading_leaves_another_runs_half_written_step_alone(tmp_path, plain):
    state = plain({"w": jnp.ones(3)})
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.save(2, state)
    os.rename(tmp_path / "2", tmp_path / "2.orbax-checkpoint-tmp")
    with Checkpoints(tmp_path) as reader:
        assert reader.steps() == [1]
        reader.restore(state)
    assert (tmp_path / "2.orbax-checkpoint-tmp").exists()
