"""E4M3 in blocks of 128: every bit equals the oracle's, and products sum in float32 what the codes stand for."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from messages import naming
from selection import pairwise

import gtp_jax as gtp
from gtp_jax import native
from gtp_jax.formats import FP8_BLOCKS, FP8_BLOCKS_1D, PackPlan, Piece, QuantizedArray, validate
from gtp_jax.ops import blocked_product

from . import oracle
from .bits import assert_same_bits, device, every_pattern

BFLOAT16 = ml_dtypes.bfloat16
both_formats = pytest.mark.parametrize("format", [FP8_BLOCKS, FP8_BLOCKS_1D], ids=str)
KERNEL = native.has("gtp_quantize_runs", "CUDA") and jax.default_backend() == "gpu"
implementations = pytest.mark.parametrize(
    "implementation",
    ["reference", pytest.param("native", marks=[pytest.mark.gpu, pytest.mark.skipif(not KERNEL, reason="no kernel")])],
)


def check(x, format, implementation="reference"):
    if implementation == "native" and format == FP8_BLOCKS:
        pytest.skip("tiles have no kernel")
    row, column = gtp.ops.quantize(device(x), format, axis="both", implementation=implementation)
    for q, own in ((row, x), (column, x.T)):
        validate(q)
        codes, inverse = oracle.quantize_blocked(own, format.block)
        assert_same_bits(q.scales, inverse, "scales")
        assert_same_bits(q.codes, codes, "codes")


def wide(shape, seed=0):
    """Numbers of all sizes, with a NaN, an Inf and a block of zeros."""
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=shape) * np.exp(18 * np.clip(rng.normal(size=shape), -4, 4))).astype(np.float32)
    x[1, 2], x[-1, 0], x[:, shape[1] // 2] = np.nan, -np.inf, 0
    return x


@pytest.mark.full
@both_formats
@implementations
def test_every_bfloat16_as_the_amax_of_its_block(format, implementation):
    patterns = np.arange(65536, dtype=np.uint16).reshape(-1, 1)
    step = np.arange(128, dtype=np.uint16)
    below = (patterns & 0x7FFF) - np.minimum(patterns & 0x7FFF, step * step)
    x = (below | (patterns & 0x8000) ^ (step % 2 << 15)).view(BFLOAT16)
    if format == FP8_BLOCKS:  # one value a block, in its first row
        x = np.pad(x[::8, None], ((0, 0), (0, 127), (0, 0))).reshape(-1, 128)[: 128 * 1024]
    check(x, format, implementation)


@implementations
def test_every_bfloat16_as_an_element(implementation):
    x = np.zeros((65536, 128), BFLOAT16)
    x[:, 0], x[:, 1] = every_pattern(BFLOAT16), 1
    check(x, FP8_BLOCKS_1D, implementation)


@implementations
@pytest.mark.parametrize(
    "format, shape, dtype",
    pairwise([FP8_BLOCKS, FP8_BLOCKS_1D], [(130, 300), (128, 256), (3, 5)], [np.float32, BFLOAT16, np.float16]),
)
def test_numbers_of_all_sizes_in_any_shape(format, implementation, shape, dtype):
    with np.errstate(over="ignore", invalid="ignore"):
        check(wide(shape).astype(dtype), format, implementation)


@implementations
def test_scales_at_the_ends_of_float32(implementation):
    tops = np.array([0, 2.0**-149, 1e-40, 2.0**-126, 2.0**-119, 448 * 2.0**-127, 448, 449, 3e38, np.inf], np.float32)
    x = np.zeros((len(tops), 128), np.float32)
    x[:, 5], x[:, 6] = tops, np.minimum(tops / 3, 1)
    check(x, FP8_BLOCKS_1D, implementation)
    scales = np.asarray(gtp.ops.quantize(device(x), FP8_BLOCKS_1D, implementation=implementation).scales)[:, 0]
    assert scales[0] == 1 and scales[-1] == 1  # of 0 and Inf
    assert np.all(scales[1:6] == np.float32(2.0**-127)) and scales[6] == 1 and scales[7] == 2


@pytest.mark.parametrize("format, dtype", pairwise([FP8_BLOCKS, FP8_BLOCKS_1D], [jnp.bfloat16, jnp.float32], usual=2))
def test_values_of_codes_are_exact(format, dtype):
    x = wide((140, 260))
    for q, own in zip(gtp.ops.quantize(device(x), format, axis="both"), (x, x.T), strict=True):
        values = np.asarray(gtp.ops.dequantize(q, dtype)).astype(np.float64)
        wanted = oracle.rounded_blocked(own, format.block)
        np.testing.assert_array_equal(values, wanted.T if q.columns else wanted)


def operand(rng, rows, depth, block, *, one_sign):
    """A copy whose codes have the contraction last, and its values in float64."""
    x = rng.uniform(0.5, 1, (rows, depth)) if one_sign else rng.normal(size=(rows, depth))
    x = (x * np.exp2(rng.integers(-9, 9, (rows, 1)))).astype(np.float32)
    format = FP8_BLOCKS if block == (128, 128) else FP8_BLOCKS_1D
    codes, inverse = oracle.quantize_blocked(x, block)
    q = QuantizedArray(jnp.asarray(codes), jnp.asarray(inverse), None, format, x.shape)
    return q, oracle.dequantize_blocked(codes, inverse, block)


@implementations
@pytest.mark.parametrize("block, shape", pairwise([(128, 128), (1, 128)], [(32, 48, 16384), (130, 140, 300)]), ids=str)
def test_products_are_the_sums_of_what_was_quantized(implementation, block, shape):
    # Tensor cores keep few bits of a sum of at most 128 products: 5e-5 here. Of 16,384 products of one sign, sums that
    # are not promoted to float32 would lose more than 1e-3.
    most = 2e-6 if implementation == "reference" else 1e-4
    rng = np.random.default_rng(0)
    rows, columns, depth = shape
    for one_sign in (True, False):
        a, x = operand(rng, rows, depth, (1, 128), one_sign=one_sign)
        b, w = operand(rng, columns, depth, block, one_sign=one_sign)
        found = jax.jit(blocked_product, static_argnums=(2, 3))(a, b, jnp.float32, implementation)
        size = np.abs(x) @ np.abs(w).T
        assert np.max(np.abs(np.asarray(found, np.float64) - x @ w.T) / size) < most
        rounded = blocked_product(a, b, jnp.bfloat16, implementation)
        assert np.max(np.abs(np.asarray(rounded, np.float64) - x @ w.T) / size) < 2**-8


def test_a_product_in_float64_has_no_error():
    a, x = operand(np.random.default_rng(0), 5, 700, (1, 128), one_sign=False)
    b, w = operand(np.random.default_rng(1), 7, 700, (128, 128), one_sign=False)
    with jax.enable_x64(True):
        np.testing.assert_allclose(blocked_product(a, b, jnp.float64), x @ w.T, rtol=1e-13, atol=1e-12)


def test_what_blocks_of_128_cannot_do_is_refused():
    x = jnp.ones((4, 256))
    with pytest.raises(ValueError, match=naming("`amax` FP8_BLOCKS")):
        gtp.ops.quantize(x, FP8_BLOCKS, amax=jnp.float32(1))
    with pytest.raises(ValueError, match=naming("stochastic FP8_BLOCKS_1D")):
        gtp.ops.quantize(x, FP8_BLOCKS_1D, key=jnp.zeros(2, jnp.uint32))
    with pytest.raises(NotImplementedError, match=naming("'quantize' 'cpu' GPUs")):
        gtp.ops.quantize(x, FP8_BLOCKS_1D, implementation="native")
    with pytest.raises(NotImplementedError, match=naming("FP8_BLOCKS kernel")):
        gtp.ops.dequantize(gtp.ops.quantize(x, FP8_BLOCKS), implementation="native")
    with pytest.raises(TypeError, match=naming("`gtp_jax.ops.quantize` differentiable")):
        jax.grad(lambda x: jnp.sum(gtp.ops.quantize(x, FP8_BLOCKS).scales))(x)
    plan = PackPlan((Piece(rows=4, cols=256, transposed=False, total_rows=4, out=0, out_row=0),))
    with pytest.raises(TypeError, match=naming("`format` FP8_BLOCKS gtp_jax.formats.NVFP4")):
        gtp.ops.pack([x], FP8_BLOCKS, None, plan)
    q = gtp.ops.quantize(x, FP8_BLOCKS_1D)
    with pytest.raises(NotImplementedError, match=naming("Hopper 128")):
        blocked_product(q, q, jnp.float32, "native")
