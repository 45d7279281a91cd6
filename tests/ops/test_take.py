"""Rows are copied to their places bit for bit, on GPUs by a kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import pairwise

from gtp_jax import native
from gtp_jax.ops._grouped._take import take


def given(dtype, rows, features, places):
    rng = np.random.default_rng([rows, features, places])
    x = rng.integers(0, 256, (rows, features)).astype(np.uint8)
    x = jnp.asarray(x) if dtype == "uint8" else jnp.asarray(rng.normal(size=(rows, features)), dtype)
    index = rng.integers(0, rows, places).astype(np.int32)
    return x, jnp.asarray(index), jnp.asarray(rng.random(places) < 0.7)


def taken(x, index, real):
    rows = np.asarray(x)[np.asarray(index)]
    return rows if real is None else np.where(np.asarray(real)[:, None], rows, np.zeros_like(rows))


@pytest.mark.parametrize("dtype, masked", pairwise(["uint8", "bfloat16", "float32"], [False, True], usual=2))
def test_a_place_has_its_row_or_zeros(dtype, masked):
    x, index, real = given(dtype, 20, 24, 50)
    real = real if masked else None
    np.testing.assert_array_equal(np.asarray(jax.jit(take)(x, index, real)), taken(x, index, real))


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("features", [16, 24, 2048, 5000])  # rows of 24 bytes are XLA's to gather
@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32"])
def test_on_gpus_a_place_has_its_row_or_zeros(dtype, features, masked):
    x, index, real = given(dtype, 300, features, 1001)
    real = real if masked else None
    np.testing.assert_array_equal(np.asarray(jax.jit(take)(x, index, real)), taken(x, index, real))


@pytest.mark.gpu
def test_on_gpus_what_is_not_finite_stays_in_its_row_and_no_row_is_zeros():
    assert native.has("gtp_take", "CUDA")
    x = jnp.full((4, 8), jnp.nan).at[1].set(1.0)
    found = np.asarray(native.take(x, jnp.array([1, -1, 4, 2], jnp.int32)))
    np.testing.assert_array_equal(found[:3], [[1.0] * 8, [0.0] * 8, [0.0] * 8])
    assert np.isnan(found[3]).all()
