"""Products of one row, which GPUs compute as sums of products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import others_full, pairwise

from gtp_jax.ops import _one_row, attention, linear


@pytest.mark.parametrize(
    "shape, dtype", pairwise([(32,), (1, 1, 32), (1, 32)], ["float64", "bfloat16", "float32"], usual=2), ids=str
)
def test_a_product_of_one_row_and_its_gradients_are_those_of_a_matmul(shape, dtype, x64, monkeypatch):
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=size), dtype) for size in (shape, (48, 32)))

    def loss(x, weight):
        return jnp.sum(jnp.sin(linear(x, weight).astype(jnp.float64)))

    run = lambda: jax.jit(lambda *given: (linear(*given), *jax.grad(loss, (0, 1))(*given)))(x, weight)  # noqa: E731
    wanted = run()
    monkeypatch.setattr(_one_row, "platform", lambda: "gpu")
    found = run()
    program = str(jax.make_jaxpr(linear)(x, weight))
    assert "dot_general" not in program and "reduce_sum" in program
    tolerance = {"float64": 1e-14, "float32": 1e-5, "bfloat16": 1e-2}[dtype]
    for own, exact in zip(found, wanted, strict=True):
        assert own.dtype == exact.dtype and own.shape == exact.shape
        exact = np.asarray(exact, np.float64)
        np.testing.assert_allclose(np.asarray(own, np.float64), exact, rtol=0, atol=tolerance * np.abs(exact).max())


def test_products_of_several_rows_stay_matmuls(monkeypatch):
    monkeypatch.setattr(_one_row, "platform", lambda: "gpu")
    assert "dot_general" in str(jax.make_jaxpr(linear)(jnp.ones((2, 8)), jnp.ones((4, 8))))


@pytest.mark.parametrize("keys", others_full([12, 513], [12]), ids=["sums", "matmuls"])
def test_attention_of_one_query_to_few_keys_is_that_of_matmuls(keys, x64, monkeypatch):
    rng, shapes = np.random.default_rng(0), ((1, 6), (keys, 2), (keys, 2))
    q, k, v = (jnp.asarray(rng.normal(size=(1, length, heads, 16))) for length, heads in shapes)

    def loss(q, k, v):
        seen = attention(q, k, v, causal=True, query_position=jnp.array([7]), implementation="reference")
        return jnp.sum(jnp.sin(seen)), seen

    run = lambda: jax.jit(jax.value_and_grad(lambda *a: loss(*a), (0, 1, 2), has_aux=True))(q, k, v)  # noqa: E731
    wanted = run()
    monkeypatch.setattr(_one_row, "platform", lambda: "gpu")
    found = run()
    assert ("dot_general" in str(jax.make_jaxpr(lambda *a: loss(*a)[1])(q, k, v))) == (keys > 512)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-14), found, wanted)
