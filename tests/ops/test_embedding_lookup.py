import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from gtp_jax.ops import embedding_lookup


def of_text(rng, rows, count):
    """Ids as text has them: the r-th most frequent 1 / r as often as the first (Zipf)."""
    weights = 1 / np.arange(1, rows + 1)
    return rng.choice(rows, count, p=weights / weights.sum()).astype(np.int32)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64])
def test_rows_are_those_of_the_table_to_the_bit_and_of_nan_for_ids_outside(dtype):
    rng = np.random.default_rng()
    with jax.enable_x64(True):
        table = jnp.asarray(rng.normal(size=(7, 5)), dtype)
        ids = jnp.asarray(rng.integers(-3, 12, (4, 6)))
        found = jax.jit(embedding_lookup)(table, ids)
        assert found.dtype == dtype
        inside = (np.asarray(ids) >= 0) & (np.asarray(ids) < 7)
        np.testing.assert_array_equal(np.asarray(found)[inside], np.asarray(table)[np.asarray(ids)[inside]])
        assert np.isnan(np.asarray(found, np.float64)[~inside]).all()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_gradient_of_a_frequent_row_is_the_exact_sum_rounded_once(dtype):
    rng = np.random.default_rng()
    ids = jnp.asarray(of_text(rng, 50, (8, 4096)))
    gradient = rng.uniform(0.5, 1, (8, 4096, 3)).astype(dtype)  # of one sign, as what adds up over a batch
    table = jnp.zeros((50, 3), dtype)
    found = jax.jit(lambda g: jax.vjp(lambda t: embedding_lookup(t, ids), table)[1](g)[0])(gradient)
    exact = np.zeros((50, 3))
    np.add.at(exact, ids, gradient.astype(np.float64))
    assert found.dtype == dtype
    place = np.finfo(np.float16).eps if dtype == np.float16 else float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=0.51 * place)
    assert exact.max() * place > 4  # so a running sum of this dtype would have stood still
