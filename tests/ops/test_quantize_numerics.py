"""Every format, copy and input dtype equals the oracle bit for bit: all 16-bit values in every role, any shape."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from selection import others_full, pairwise

import gtp_jax as gtp
from gtp_jax.formats import FORMATS, FP8_E4M3, FP8_E5M2, MXFP8, NVFP4, NVFP4_1D

from . import oracle
from .bits import AMAXES, assert_same_bits, device, every_bfloat16_as_float32, every_pattern
from .both import check_quantize

BFLOAT16 = ml_dtypes.bfloat16
EVERY = list(FORMATS.values())
OF_EACH_KIND = [NVFP4, NVFP4_1D, MXFP8, FP8_E4M3]


def formats(cases, *usual):
    """The formats of a test; by default the usual ones, or all."""
    return pytest.mark.parametrize("format", others_full(cases, usual or cases), ids=str)


def amax_of(format, values):
    """Amaxes to be given, for a format that takes them."""
    return np.asarray(values, np.float32) if format.has_amax else None


@formats(EVERY, NVFP4_1D, FP8_E5M2)
def test_every_bfloat16_as_an_element(format, implementation):
    # a block each: the value, and a companion that bounds the block's amax from below
    values = every_pattern(BFLOAT16).reshape(-1, 1)
    x = np.zeros((65536, 32), BFLOAT16)
    x[:, :1], x[:, 1], x[:, 16:17], x[:, 17] = values, 1, values, 2.0**-60
    check_quantize(x, format, implementation)


@formats([NVFP4_1D, FP8_E4M3, FP8_E5M2], FP8_E4M3)
def test_every_bfloat16_as_an_element_under_amaxes_of_all_sizes(format, implementation):
    x = np.zeros((len(AMAXES), 65536, 16), BFLOAT16)
    x[:, :, 0], x[:, :, 1] = every_pattern(BFLOAT16), 2.0**-20
    if format.block is None:
        x = x[:, :, :1].reshape(len(AMAXES), 256, 256)
    check_row(x, format, AMAXES, implementation)


@formats(EVERY, NVFP4_1D, MXFP8)
def test_every_bfloat16_as_the_amax_of_its_block(format, implementation):
    # the value and its neighbours below, so that codes next to the largest occur
    patterns = np.arange(65536, dtype=np.uint16).reshape(-1, 1)
    step = np.arange(32, dtype=np.uint16)
    below = (patterns & 0x7FFF) - np.minimum(patterns & 0x7FFF, step * step)
    x = (below | (patterns & 0x8000) ^ (step % 2 << 15)).view(BFLOAT16)
    check_row(x, format, 1000.0, implementation)


@formats([NVFP4, NVFP4_1D, FP8_E4M3, FP8_E5M2], NVFP4)
def test_every_bfloat16_as_the_amax_of_the_tensor(format, implementation):
    values = [1e-40, 1e-30, -1e-10, 1e-3, 0.3, 1, -3, 5, 6, 100, 2688, 1e5, 1e10, 1e30, -3e38, 0]
    x = np.tile(np.array(values, np.float32), (65536, 1, 1))
    check_row(x, format, every_bfloat16_as_float32(), implementation)


@formats([NVFP4_1D, MXFP8, FP8_E4M3, FP8_E5M2], MXFP8)
def test_every_float16_as_an_element(format, implementation):
    x = np.stack([every_pattern(np.float16)] * 2, axis=1).reshape(-1, 1).repeat(4, 1)
    x[:, 1:] = [1, 0.001, 6e-8]
    check_quantize(x.reshape(-1, 16), format, implementation)


def check_row(x, format, amax, implementation):
    row = gtp.ops.quantize(device(x), format, amax=amax_of(format, amax), implementation=implementation)
    codes, scales = oracle.quantize(format.name, x, np.asarray(amax, np.float32))
    if scales is not None:
        assert_same_bits(row.scales, scales, "scales")
    assert_same_bits(row.codes, codes, "codes")


SHAPES = [(0, 5), (1, 0, 3), (7, 67), (2, 1, 35, 16), (2, 33, 31)]


@pytest.mark.parametrize("format, shape, dtype", pairwise(OF_EACH_KIND, SHAPES, [np.float32, BFLOAT16, np.float16]))
def test_any_shape(format, shape, dtype, implementation):
    check_quantize(np.random.default_rng(0).normal(size=shape).astype(dtype), format, implementation)


@formats(EVERY, NVFP4, NVFP4_1D, MXFP8, FP8_E5M2)
def test_any_values(format, implementation):
    # patterns, so that subnormals, signed zeros, Inf and NaN are as likely as anything else
    for seed in range(25):
        random = np.random.default_rng(seed)
        exponents = random.normal(random.integers(0, 256), random.integers(1, 41), (64, 96))
        patterns = np.clip(exponents.round(), 0, 255).astype(np.uint32) << 23
        patterns |= random.integers(0, 1 << 23, patterns.shape, dtype=np.uint32)
        patterns |= random.integers(0, 2, patterns.shape, dtype=np.uint32) << 31
        check_quantize(patterns.view(np.float32), format, implementation, what=f"seed {seed}")


@formats(EVERY, NVFP4_1D, MXFP8, FP8_E5M2)
def test_ties_and_their_neighbours(format, implementation):
    # with this amax the tensor's scale is 1, and each block's largest makes the block's scale 1 as well
    top = format.element_max
    grid = every_code(format)
    exact = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]).astype(np.float32)
    around = np.concatenate([exact, np.nextafter(exact, np.float32(0)), np.nextafter(exact, np.float32(1e9))])
    around = np.concatenate([around, -around])
    x = np.zeros((len(around), 32), np.float32)
    x[:, 0], x[:, 16], x[:, 1], x[:, 17] = top, top, around, around
    x = np.repeat(x, 16, 0) if format is NVFP4 else x
    check_quantize(x, format, implementation, amax=amax_of(format, top * (format.scale_max or 1)))


def every_code(format) -> np.ndarray:
    dtype = {"e2m1": ml_dtypes.float4_e2m1fn, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
    positive = np.arange(1 << format.element_bits - 1, dtype=np.uint8).view(dtype[format.element]).astype(np.float64)
    return positive[np.isfinite(positive)]


@formats(EVERY, NVFP4, NVFP4_1D, MXFP8, FP8_E4M3)
def test_zeros_keep_their_sign_and_the_largest_and_smallest_float32_are_those_of_the_oracle(format, implementation):
    x = np.zeros((64, 96), np.float32)
    x[:, 1::2] = -0.0
    x[0, 40] = 3.0
    check_quantize(x, format, implementation)
    row = gtp.ops.quantize(device(x), format, implementation=implementation)
    assert_same_bits(gtp.ops.dequantize(row, jnp.float32, implementation=implementation), x)
    if row.scales is not None:
        assert np.asarray(row.scales)[-1, 0] == 0
    largest, smallest = np.finfo(np.float32).max, np.float32(2.0**-149)
    x = np.zeros((64, 96), np.float32)
    x[16:, 32:] = smallest * np.arange(64, dtype=np.float32)
    check_quantize(x, format, implementation, what="all subnormal")
    x[0, :3] = largest, -largest, smallest
    check_quantize(x, format, implementation)


@formats(EVERY, NVFP4, NVFP4_1D, MXFP8, FP8_E4M3)
def test_a_number_that_is_not_finite_spoils_its_block_and_no_other(format, implementation):
    clean = np.random.default_rng(0).normal(size=(64, 96)).astype(np.float32)
    clean[0, 0] = 9.0  # the amax lies elsewhere
    height, width = format.block or (1, 1)

    def values(x):
        pair = gtp.ops.quantize(device(x), format, axis="both", implementation=implementation)
        return [np.asarray(gtp.ops.dequantize(q, jnp.float32, implementation=implementation)) for q in pair]

    for value in (np.nan, -np.inf):
        spoilt = clean.copy()
        spoilt[21, 50] = value
        check_quantize(spoilt, format, implementation)
        sides = (height, width), (width, height)
        for got, wanted, (down, across) in zip(values(spoilt), values(clean), sides, strict=True):
            rows, columns = np.indices(got.shape)
            block = (rows // down == 21 // down) & (columns // across == 50 // across)
            assert np.isnan(got[block]).all()
            assert_same_bits(got[~block], wanted[~block])


@formats(OF_EACH_KIND, NVFP4, NVFP4_1D)
def test_one_copy_is_that_of_both_and_copies_agree_where_blocks_are_square_or_absent(format, implementation):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 96)).astype(np.float32))
    row, column = gtp.ops.quantize(x, format, axis="both", implementation=implementation)
    for axis, both in (("row", row), ("column", column)):
        alone = gtp.ops.quantize(x, format, axis=axis, implementation=implementation)
        assert_same_bits(alone.codes, both.codes, axis)
        assert both.scales is None or (np.asarray(alone.scales) == np.asarray(both.scales)).all()
    same = np.array_equal(gtp.ops.dequantize(row, jnp.float32), gtp.ops.dequantize(column, jnp.float32))
    # MXFP8's blocks differ too, but with scales of powers of two most values are those of either
    assert same == (format is not NVFP4_1D) or format is MXFP8


def test_one_amax_a_leading_index(implementation):
    x = np.random.default_rng(0).normal(size=(3, 2, 20, 40)).astype(np.float32)
    for amax in (np.array([5, 50, 0.5], np.float32), np.arange(1, 7, dtype=np.float32).reshape(3, 2)):
        for format in (NVFP4, FP8_E4M3):
            check_quantize(x, format, implementation, amax=amax, what=f"{format} {amax.shape}")
