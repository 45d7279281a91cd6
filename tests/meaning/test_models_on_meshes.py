"""Ordinary Flax models through `train_step` mean on every mesh what they mean without one.

Losses, every gradient, other variables; float64, 1e-12.
"""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from selection import pairwise

import gtp_jax as gtp

from .models import CASES

MESHES = {
    "gtp 4 x tp 2": dict(gtp=4, tp=2),
    "gtp 8": dict(gtp=8),
    "dp 2 x gtp 2 x tp 2": dict(dp=2, gtp=2, tp=2),
    "gtp 3": dict(gtp=3),
    "tp 3": dict(tp=3),
    "one device": dict(gtp=1),
}
STEPS = 2


def scope(degrees):
    if degrees is None:
        return contextlib.nullcontext()
    return jax.set_mesh(gtp.make_mesh(**degrees, devices=jax.devices()[: math.prod(degrees.values())]))


def trained(name: str, microbatches: int, degrees):
    """Losses of the steps, the gradient that the first took, and parameters and other variables behind the last."""
    case = CASES[name]
    batch = {key: jnp.asarray(value) for key, value in case.batch().items()}
    with scope(degrees):
        optimizer = optax.chain(optax.trace(decay=0.9), optax.sgd(0.1))  # the trace keeps the first step's gradient
        state = gtp.TrainState.create(gtp.init(case.make, nnx.Rngs(0, dropout=1)), optimizer)
        step = gtp.train_step(case.loss, optimizer, microbatches=microbatches)
        losses, gradient = [], None
        for _ in range(STEPS):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
            gradient = jax.tree.map(np.asarray, state.opt_state[0].trace) if gradient is None else gradient
        return losses, gradient, jax.tree.map(np.asarray, (state.params, state.model_state))


@functools.cache
def plain(name: str, microbatches: int):
    return trained(name, microbatches, None)


def assert_equal(found, wanted):
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        name = jax.tree_util.keystr(path)
        if np.issubdtype(one.dtype, np.floating):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12 * max(1e-3, np.abs(other).max()), err_msg=name)
        else:
            np.testing.assert_array_equal(one, other, err_msg=name)


@pytest.mark.filterwarnings("ignore:a weight of shape")
@pytest.mark.parametrize("name, mesh, microbatches", pairwise(CASES, MESHES, [1, 4], usual=1))
def test_a_model_means_what_it_means_without_a_mesh(name, mesh, microbatches, x64):
    losses, gradient, after = trained(name, microbatches, MESHES[mesh])
    wanted = plain(name, microbatches)
    np.testing.assert_allclose(losses, wanted[0], rtol=1e-12)
    assert_equal(gradient, wanted[1])
    assert_equal(after, wanted[2])
