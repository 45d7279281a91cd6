"""States to save: a small Llama with padded weights, every array filled with random bits."""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
import pytest

import gtp_jax as gtp
from gtp_jax.models import Llama, LlamaConfig
from gtp_jax.nn import Skeleton, abstract_model

# Vocabulary and ffn need padding on every mesh with gtp > 1, and no mesh of more than 2 divides the vocabulary; width
# 128 is what Adafactor starts to factor at.
SIZES = {"vocab": 1002, "dim": 128, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 120}


@pytest.fixture(scope="session")
def make_state():
    """`make_state(degrees, optimizer)`: shapes and shardings of a state on a mesh; nothing is computed."""

    def make(degrees, optimizer=None, **sizes):
        config = LlamaConfig(**{**SIZES, **sizes})
        count = int(np.prod(list(degrees.values())))
        with jax.set_mesh(gtp.make_mesh(**degrees, devices=jax.devices()[:count])):
            model = abstract_model(lambda rngs: Llama(config, rngs=rngs))
            return gtp.TrainState.create(model, optimizer or optax.adamw(1e-3))

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
    """`logical(state, optimizer)`: its arrays in numpy without padding, in the order of `jax.tree.leaves`."""

    def unpad(layout, array):
        array = np.asarray(array)
        if layout is None or array.shape[-len(layout.shape) :] != layout.physical_shape:
            return array
        dim = array.ndim - len(layout.shape) + layout.dim
        parts = np.split(array, layout.tp_outer, axis=dim)
        return np.concatenate([part.take(np.arange(layout.rows), axis=dim) for part in parts], axis=dim)

    def strip(state, optimizer=None):
        layouts = state.skeleton.layouts
        undo = jax.tree.map(lambda layout: functools.partial(unpad, layout), layouts, is_leaf=lambda x: x is None)
        params = jax.tree.map(lambda undo, array: undo(array), undo, state.params)
        optimizer = optimizer or optax.adamw(1e-3)
        opt_state = optax.tree_map_params(optimizer, lambda array, undo: undo(array), state.opt_state, undo)
        return [np.asarray(leaf) for leaf in jax.tree.leaves((params, opt_state, state.step))]

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
