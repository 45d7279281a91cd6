"""The Hadamard transform: the matrix it is, its inverse, its amax, and the copy made from it."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from selection import others_full

import gtp_jax as gtp
from gtp_jax.formats import NVFP4_1D

from . import oracle
from .bits import assert_same_bits, device
from .both import check_quantize


def test_it_is_the_sylvester_matrix_with_the_published_signs():
    sylvester = np.array([[(-1) ** (i & j).bit_count() for j in range(16)] for i in range(16)])
    got = np.asarray(gtp.ops.hadamard(jnp.eye(16)), np.float32)
    np.testing.assert_array_equal(got, sylvester * oracle.SIGNS / 4)


def test_it_inverts_within_bfloat16s_rounding():
    x = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    back = np.asarray(gtp.ops.hadamard(gtp.ops.hadamard(jnp.asarray(x)), inverse=True), np.float32)
    norm = np.sqrt((x**2).reshape(4, 16, 32).sum(1, keepdims=True)).repeat(16, 1).reshape(64, 32)
    assert (np.abs(back - x) <= norm * 2.0**-8 + np.abs(x) * 2.0**-8).all()


@pytest.mark.parametrize("rows", others_full([1, 16, 37], [37]))
def test_it_equals_the_oracle_on_any_exponents(rows):
    random = np.random.default_rng(rows)
    bits = random.integers(0, 255 << 23, (rows, 64), dtype=np.uint32)
    bits[:, 32:] &= 0x01FFFFFF  # subnormals and the smallest normal numbers
    bits |= random.integers(0, 2, bits.shape, dtype=np.uint32) << 31
    x = bits.view(np.float32)
    got, expected = np.asarray(gtp.ops.hadamard(jnp.asarray(x))), oracle.hadamard(x)
    number = ~np.isnan(expected.astype(np.float32))
    assert (np.isnan(got.astype(np.float32)) == ~number).all()
    assert_same_bits(got[number], expected[number])


def test_amax_is_that_of_the_transformed(implementation):
    random = np.random.default_rng(0)
    for x in (
        random.normal(size=(37, 50)).astype(np.float32),
        random.normal(size=(2, 3, 20)).astype(ml_dtypes.bfloat16),
    ):
        expected = oracle.amax(np.array([oracle.hadamard(m.astype(np.float32)) for m in x.reshape(-1, *x.shape[-2:])]))
        assert_same_bits(gtp.ops.hadamard_amax(device(x), implementation=implementation), expected)


def test_amax_leaves_out_what_is_not_finite(implementation):
    x = np.zeros((32, 3), np.float32)
    x[0, 0], x[3, 1], x[20, 2] = np.inf, np.nan, 8
    assert float(gtp.ops.hadamard_amax(jnp.asarray(x), implementation=implementation)) == 2.0


@pytest.mark.parametrize("key", [None, [1, 2]], ids=["nearest", "stochastic"])
def test_the_column_wise_copy_is_that_of_the_transformed(key, implementation):
    x = np.random.default_rng(0).normal(size=(2, 37, 50)).astype(np.float32)
    x[1, 20, 7] = np.nan
    check_quantize(x, NVFP4_1D, implementation, hadamard=True, key=key)


def test_dequantized_it_can_be_inverted(implementation):
    x = np.random.default_rng(0).normal(size=(37, 48)).astype(np.float32)
    q = gtp.ops.quantize(jnp.asarray(x), NVFP4_1D, axis="column", hadamard=True, implementation=implementation)
    assert q.shape == (48, 48)
    back = np.asarray(gtp.ops.hadamard(gtp.ops.dequantize(q, jnp.float32), inverse=True), np.float32)[:37]
    assert np.sqrt(((back - x) ** 2).mean()) < 0.12  # FP4's own error; 1.4 without the inverse
