"""Dequantization equals the oracle for every code under every scale, in every dtype and orientation."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from selection import others_full, pairwise

import gtp_jax as gtp
from gtp_jax.formats import FORMATS, FP8_BLOCKS, FP8_E4M3, FP8_E5M2, MXFP8, NVFP4, NVFP4_1D, QuantizedArray

from . import oracle
from .bits import AMAXES, every_bfloat16_as_float32
from .both import check_dequantize

FINITE = np.append(AMAXES, [7.0, 2.0**-126, 1e-42, 3e35]).astype(np.float32)


def every_code_and_scale(format) -> QuantizedArray:
    """All bytes of codes under all bytes of scales, for each amax in the leading dimension."""
    height, width = format.block or (1, 256)
    codes = np.arange(256, dtype=np.uint8).reshape(-1, width * format.element_bits // 8)
    scales = None
    if format.block:
        scales = np.arange(256, dtype=np.uint8).repeat(len(codes) // height).reshape(-1, 1)
        codes = np.tile(codes, (256, 1))
    amaxes = jnp.asarray(FINITE) if format.has_amax else None
    lead = (len(FINITE),) if format.has_amax else ()

    def over_lead(array):
        return jnp.asarray(np.broadcast_to(array, (*lead, *array.shape)))

    return QuantizedArray(
        over_lead(codes), None if scales is None else over_lead(scales), amaxes, format, (len(codes), width)
    )


@pytest.mark.parametrize("format, dtype", pairwise(FORMATS.values(), [jnp.bfloat16, jnp.float32, jnp.float16]), ids=str)
def test_every_code_under_every_scale(format, dtype, implementation):
    check_dequantize(every_code_and_scale(format), implementation, dtype)


@pytest.mark.parametrize("format", others_full([NVFP4_1D, FP8_E4M3, FP8_E5M2], [NVFP4_1D]), ids=str)
def test_every_bfloat16_as_amax(format, implementation):
    wholes = jnp.asarray(every_bfloat16_as_float32())
    codes = np.array([0x80, 0x01, 0x7F, 0x9A], np.uint8)
    matrix = (1, 4 * 8 // format.element_bits)
    tiled = jnp.asarray(np.tile(codes, (65536, 1, 1)))
    for scale in (0x7E, 0x01) if format.block else (None,):
        scales = None if scale is None else jnp.full((65536, 1, 1), scale, jnp.uint8)
        check_dequantize(QuantizedArray(tiled, scales, wholes, format, matrix), implementation, jnp.float32)


SHAPES = [(0, 5), (1, 0, 3), (7, 67), (2, 1, 35, 16), (2, 33, 31)]


@pytest.mark.parametrize("format, shape, columns", pairwise([NVFP4, NVFP4_1D, MXFP8, FP8_E4M3], SHAPES, [False, True]))
def test_any_shape_and_orientation(format, shape, columns, implementation):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    whole = oracle.amax(x)
    codes, scales = oracle.quantize(format.name, x, whole, columns=columns)
    q = QuantizedArray(
        jnp.asarray(codes),
        None if scales is None else jnp.asarray(scales),
        jnp.asarray(whole) if format.has_amax else None,
        format,
        shape[-2:],
        columns,
    )
    check_dequantize(q, implementation, jnp.bfloat16, f"{x.shape} {'column' if columns else 'row'}")


def test_an_amax_whose_product_with_a_scale_overflows_is_where_it_is_documented(implementation):
    limit = np.float32(np.finfo(np.float32).max / 448)
    amax = jnp.asarray([limit, limit * np.float32(1.0001)])
    x = jnp.broadcast_to(amax[:, None, None], (2, 16, 16))
    q = gtp.ops.quantize(x, NVFP4, amax=amax, implementation=implementation)
    below, above = np.asarray(gtp.ops.dequantize(q, jnp.float32, implementation=implementation))
    np.testing.assert_allclose(below, limit, rtol=1e-6)
    assert np.all(np.isinf(above))


@pytest.mark.parametrize("scales", [(0, 3e-5), (1.1e-38, 7e-42), (3.3, 1e37)], ids=str)
def test_tiles_with_scales_that_are_no_powers_of_two_have_numpys_values(scales):
    codes = np.random.default_rng(0).integers(0, 256, (256, 128), dtype=np.uint8)
    codes[codes & 127 == 127] = 0  # NaN
    inverse = np.array(scales, np.float32)[:, None]
    found = gtp.ops.dequantize(
        QuantizedArray(jnp.asarray(codes), jnp.asarray(inverse), None, FP8_BLOCKS, (256, 128)), jnp.float32
    )
    with np.errstate(over="ignore"):
        wanted = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.repeat(inverse, 128, 0)
    assert np.asarray(found).tobytes() == wanted.tobytes()
