"""States to save: a small Llama of odd sizes, every array filled with random bits."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import gtp_jax as gtp
from gtp_jax.nn import ModelDef

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
        return gtp.TrainState(params, opt_state, jax.numpy.int32(0), ModelDef(None, None, {}, {}))

    return make


@pytest.fixture(scope="session")
def filled():
    """`filled(state, seed)`: the state with random values everywhere."""

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
    """`logical(state)`: its arrays in numpy, in the order of `jax.tree.leaves`."""
    return lambda state: [np.asarray(leaf) for leaf in jax.tree.leaves((state.params, state.opt_state, state.step))]


@pytest.fixture(scope="session")
def assert_same_bits():
    """`assert_same_bits(left, right)`: for lists of numpy arrays."""

    def check(left, right):
        assert len(left) == len(right)
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), index
            assert a.tobytes() == b.tobytes(), f"leaf {index}"

    return check
