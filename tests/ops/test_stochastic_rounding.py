"""Stochastic rounding: the published generator, unbiased, reproducible, and no new program for a new key."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from selection import others_full, pairwise

import gtp_jax as gtp
from gtp_jax.formats import NVFP4, NVFP4_1D
from gtp_jax.ops._quantize import _call
from gtp_jax.ops.reference._philox import philox

from . import oracle
from .bits import assert_same_bits
from .both import check_quantize

# Known answers of Random123 1.14 (Salmon et al.), `kat_vectors`, philox4x32 10.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]
SAMPLES = 1 << 14
VALUES = np.array([0.01, 0.1, 0.25, 0.4, 0.6, 1.1, 1.3, 1.9, 2.05, 2.5, 3.3, 3.7, 4.1, 5.0, 5.7], np.float32)


@pytest.mark.parametrize("counter, key, expected", KNOWN)
def test_philox_gives_the_known_answers(counter, key, expected):
    words = [[jnp.uint32(word) for word in group] for group in (counter, key)]
    assert [int(word) for word in philox(*map(tuple, words))] == expected
    assert oracle.philox(counter, key) == expected


@pytest.mark.parametrize("format, shape", pairwise([NVFP4, NVFP4_1D], [(5, 37), (2, 18, 33)], usual=1), ids=str)
def test_codes_equal_the_oracles(format, shape, implementation):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    x[..., 0, 0] = -0.0
    check_quantize(x, format, implementation, key=[0xDEADBEEF, 0xFFFFFFFF])


def grid_step(values: np.ndarray) -> np.ndarray:
    return np.where(values < 2, 0.5, np.where(values < 4, 1.0, 2.0))


def test_it_is_unbiased_and_biased_variants_are_told_apart(implementation):
    random = np.random.default_rng(0)
    x = random.uniform(0, 6, (1 << 17, 16)).astype(np.float32)
    x[:, 15] = 6
    values, step, octets = x[:, :15], grid_step(x[:, :15]), random.integers(0, 256, (len(x), 15))

    def bias(roundings: np.ndarray) -> float:
        """Mean error in steps; its standard deviation over 2 million roundings is 0.0003."""
        return abs(float(((roundings - values) / step).mean()))

    bound = 0.0011
    assert bias(rounded(x, implementation)[:, :15]) < bound
    assert bias(np.floor(values / step + (octets + 0.5) / 256) * step) < bound
    assert bias(np.floor(values / step + octets / 256) * step) > bound  # half a 256th too low
    assert bias(np.floor(values / step) * step) > bound  # truncating


def rounded(x: np.ndarray, implementation) -> np.ndarray:
    q = gtp.ops.quantize(jnp.asarray(x), NVFP4_1D, amax=2688.0, key=jax.random.key(0), implementation=implementation)
    assert (np.asarray(q.scales) == 0x38).all(), "the scale is 1"
    return np.asarray(gtp.ops.dequantize(q, jnp.float32), np.float64)


@pytest.mark.parametrize("format, slope, share", [(NVFP4_1D, 0.9966, 0.035), (NVFP4, 0.9994, 0.003)], ids=str)
def test_it_is_right_on_average_but_for_what_saturates(format, slope, share):
    x, keys = np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32), 32
    total = np.zeros(x.shape)
    for seed in range(keys):
        q = gtp.ops.quantize(jnp.asarray(x), format, key=jnp.array([seed, 7], jnp.uint32))
        total += np.asarray(gtp.ops.dequantize(q, jnp.float32), np.float64)
    mean = total / keys
    scales = np.asarray(q.scales).view(ml_dtypes.float8_e4m3fn).astype(np.float64) * float(q.amax) / 2688
    largest = 6 * np.repeat(np.repeat(scales, format.block[0], 0), format.block[1], 1)
    inside = np.abs(x) <= largest

    def slope_of(those: np.ndarray) -> float:
        return float((mean * x)[those].sum() / (x.astype(np.float64) ** 2)[those].sum())

    # one rounding has a standard deviation of at most a sixth of `largest`, so that the slope's is below 2e-4
    assert abs(slope_of(inside) - 1) < 6e-4
    np.testing.assert_allclose(np.abs(mean)[~inside], largest[~inside], rtol=1e-6)
    assert np.max(np.abs(x) / largest) < 17 / 16
    assert abs(slope_of(np.ones_like(inside)) - slope) < 6e-4 and abs(np.mean(~inside) - share) < 0.2 * share


@pytest.mark.parametrize("format", others_full([NVFP4, NVFP4_1D], [NVFP4]), ids=str)
def test_same_key_same_codes_other_key_other_codes(format, implementation):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32))

    def codes(seed, **kwargs):
        return np.asarray(
            gtp.ops.quantize(x, format, key=jax.random.key(seed), implementation=implementation, **kwargs).codes
        )

    assert_same_bits(codes(0), codes(0))
    raw = gtp.ops.quantize(x, format, key=jax.random.key_data(jax.random.key(0)), implementation=implementation)
    assert_same_bits(raw.codes, codes(0))
    assert (codes(0) != codes(1)).mean() > 0.3
    column = np.asarray(
        gtp.ops.quantize(x.T, format, key=jax.random.key(0), axis="column", implementation=implementation).codes
    )
    assert (codes(0) != column).mean() > 0.3  # the same values under the other copy's counter


def test_a_new_key_compiles_nothing(implementation):
    x = jnp.ones((8, 16))
    gtp.ops.quantize(x, NVFP4_1D, key=jax.random.key(0), implementation=implementation)
    before = _call._run._cache_size()
    for seed in range(1, 4):
        gtp.ops.quantize(x, NVFP4_1D, key=jax.random.key(seed), implementation=implementation)
    assert _call._run._cache_size() == before
