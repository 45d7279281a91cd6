"""A product of one row, which GPUs compute as a sum of products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gtp_jax.ops import _linear, linear


@pytest.mark.parametrize("shape", [(32,), (1, 32), (1, 1, 32)], ids=str)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_product_of_one_row_and_its_gradients_are_those_of_a_matmul(shape, dtype, x64, monkeypatch):
    x, weight = (
        jax.random.normal(jax.random.key(i), size, jnp.float64).astype(dtype)
        for i, size in enumerate((shape, (48, 32)))
    )

    def loss(x, weight):
        return jnp.sum(jnp.sin(linear(x, weight).astype(jnp.float64)))

    wanted = linear(x, weight), *jax.grad(loss, (0, 1))(x, weight)
    monkeypatch.setattr(_linear, "platform", lambda: "gpu")
    found = linear(x, weight), *jax.grad(loss, (0, 1))(x, weight)
    program = str(jax.make_jaxpr(linear)(x, weight))
    assert "dot_general" not in program and "reduce_sum" in program
    tolerance = {"float64": 1e-14, "float32": 1e-5, "bfloat16": 1e-2}[dtype]
    for own, exact in zip(found, wanted, strict=True):
        assert own.dtype == exact.dtype and own.shape == exact.shape
        exact = np.asarray(exact, np.float64)
        np.testing.assert_allclose(np.asarray(own, np.float64), exact, rtol=0, atol=tolerance * np.abs(exact).max())


def test_products_of_several_rows_stay_matmuls(monkeypatch):
    monkeypatch.setattr(_linear, "platform", lambda: "gpu")
    assert "dot_general" in str(jax.make_jaxpr(linear)(jnp.ones((2, 8)), jnp.ones((4, 8))))
