"""States to save: a small Llama with padded weights, every array filled with random bits."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import gtp_jax as gtp
from gtp_jax.nn import Skeleton

from .meshes import OPTIMIZERS, Place


@pytest.fixture(scope="session")
def make_state():
    """`make_state(degrees, optimizer)`: shapes and shardings of a state on a mesh; nothing is computed."""

    def make(degrees, optimizer=None, **sizes):
        return Place(degrees).state(optimizer or OPTIMIZERS["adamw"], **sizes)

    return make


@pytest.fixture(scope="session")
def plain():
    """`plain(params, opt_state)`: a state of arbitrary arrays, without a model."""

    def make(params, opt_state=()):
        return gtp.TrainState(params, opt_state, jax.numpy.int32(0), Skeleton(None, None, {}, {}))

    return make


@pytest.fixture(scope="session")
def filled():
    """`filled(state, seed)`: the state with random values everywhere, in the padding too."""

    def fill(state, seed=0):
        rng = np.random.default_rng(seed)

        def values(leaf):
            host = rng.standard_normal(leaf.shape).astype(leaf.dtype) if leaf.ndim else np.asarray(seed, leaf.dtype)
            if leaf.size >= 4:
                host.reshape(-1)[:4] = [-0.0, np.nan, np.inf, 1e-40]
            return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: host[index])

        return jax.tree.map(values, state)

    return fill


@pytest.fixture(scope="session")
def logical():
    """`logical(state)`: its arrays in numpy without padding, in the order of `jax.tree.leaves`."""

    def unpad(layout, array):
        array = np.asarray(array)
        if layout is not None and array.shape[-len(layout.shape) - 1 :] == (*layout.physical_shape, 1):
            return array[..., 0]  # no mirror of the weight, and marked so
        if layout is None or array.shape[-len(layout.shape) :] != layout.physical_shape:
            return array
        dim = array.ndim - len(layout.shape) + layout.dim
        parts = np.split(array, layout.tp_outer, axis=dim)
        return np.concatenate([part.take(np.arange(layout.rows), axis=dim) for part in parts], axis=dim)

    def keys(path):
        return tuple(entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey))

    def strip(state):
        flat = jax.tree_util.tree_leaves_with_path(state.skeleton.layouts, is_leaf=lambda x: x is None)
        layouts = {keys(path): layout for path, layout in flat}
        found = []
        for path, leaf in jax.tree_util.tree_leaves_with_path((state.params, state.opt_state, state.step)):
            names = keys(path)
            ends = [names[begin:] for begin in range(len(names))]
            found.append(unpad(next((layouts[end] for end in ends if end in layouts), None), leaf))
        return found

    return strip


@pytest.fixture(scope="session")
def assert_same_bits():
    """`assert_same_bits(left, right)`: for lists of numpy arrays."""

    def check(left, right):
        assert len(left) == len(right)
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), index
            assert a.tobytes() == b.tobytes(), f"leaf {index}"

    return check
