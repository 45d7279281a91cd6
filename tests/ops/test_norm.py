"""Norms hold their layout where they are trained, and are plain functions elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from gtp_jax.ops import layer_norm, rms_norm

SCALE = jnp.linspace(0.5, 2, 8)
NORMS = {"rms": lambda x: rms_norm(x, SCALE), "layer": lambda x: layer_norm(x, SCALE, -SCALE)}
both_norms = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)


@pytest.mark.full
@both_norms
def test_a_norm_can_be_exported(norm):
    x = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)
    exported = export.export(jax.jit(norm))(x)
    np.testing.assert_array_equal(exported.call(x), jax.jit(norm)(x))


@both_norms
def test_a_norm_takes_numpys_arrays_and_all_of_jaxs_transformations(norm):
    x = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)

    def loss(x):
        return (norm(x) ** 3).sum()

    @jax.jit
    def transformed(x):
        return jax.grad(loss)(x), jax.jacfwd(loss)(x), jax.vmap(jax.grad(loss))(x), jax.hessian(loss)(x[0])

    gradient, forward, mapped, hessian = transformed(x)
    np.testing.assert_allclose(forward, gradient, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(mapped, gradient, rtol=1e-4, atol=1e-5)
    assert norm(x).shape == x.shape and hessian.shape == (3, 8, 3, 8)


def test_a_zero_centered_scale_is_what_a_factor_exceeds_one_by():
    x = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    np.testing.assert_array_equal(rms_norm(x, SCALE, zero_centered=True), rms_norm(x, 1 + SCALE))


@both_norms
def test_in_training_its_input_lies_row_major(norm):
    text = jax.jit(jax.grad(lambda x: (norm(x) ** 3).sum())).lower(jnp.ones((2, 3, 8))).as_text()
    assert "LayoutConstraint" in text
