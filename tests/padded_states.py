"""Compares states with padded weights, and moves them between meshes through checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints


def same(found: Any, wanted: Any, atol: float = 1e-12) -> None:
    """Checks that the arrays of two trees differ by at most `atol`."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=atol, err_msg=jax.tree_util.keystr(path))


def outside(stored: Any, logical: Any) -> np.ndarray:
    """Returns everything in the arrays of a tree that is not in its logical arrays."""
    found = [np.zeros(0)]
    for one, own in zip(jax.tree.leaves(stored), jax.tree.leaves(logical), strict=True):
        if one.shape == own.shape:
            continue  # also of random keys, which are no NumPy arrays
        mask = np.ones(one.shape, bool)
        mask[tuple(map(slice, own.shape))] = False
        found.append(np.asarray(one)[mask])
    return np.concatenate(found)


def padding_of(state: gtp.TrainState) -> np.ndarray:
    """Returns everything in the arrays of a state that is not in its logical arrays."""
    return outside(state, state.logical())


def moved(
    checkpoints: Checkpoints,
    meshes: Iterable[contextlib.AbstractContextManager[Any]],
    make_state: Callable[[int], gtp.TrainState],
) -> Any:
    """Makes a state on each mesh, restores there what the mesh before it saved, and saves it again. Checks that nothing
    is lost, that padding is zero, and that checkpoints do not depend on the mesh. Returns the last logical state.

    Args:
        checkpoints: an empty directory of checkpoints.
        meshes: contexts that put each mesh in scope.
        make_state: a function from the number of a mesh to a state with values of its own.
    """
    kept, manifests = None, []
    for number, mesh in enumerate(meshes):
        with mesh:
            state = make_state(number)
            if kept is not None:
                state, _ = checkpoints.restore(state)
                same(state.logical(), kept, 0)
                assert not padding_of(state).any()
            kept = jax.tree.map(np.asarray, state.logical())
            checkpoints.save(number, state)
            checkpoints.wait()
            assert checkpoints.verify() == []
            manifests.append(checkpoints.manifest()["leaves"])
    assert all(one == manifests[0] for one in manifests), "shapes and digests do not depend on the mesh"
    return kept
