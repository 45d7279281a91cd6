"""Whole panels, edges and neighbours: the kernels give the oracle's bytes at sizes around every unit of work."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from selection import others_full, pairwise

import gtp_jax as gtp
from gtp_jax.formats import FP8_E4M3, MXFP8, NVFP4, NVFP4_1D, PackPlan, Piece

from ..ops.bits import assert_same_bits, device
from ..ops.both import check_dequantize, check_quantize
from ..ops.conftest import missing_kernels

FORMATS = [NVFP4, NVFP4_1D, MXFP8, FP8_E4M3]
DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16]
pytestmark = pytest.mark.skipif(missing_kernels() is not None, reason=missing_kernels() or "")
formats_and_dtypes = pytest.mark.parametrize("format, dtype", pairwise(FORMATS, DTYPES), ids=str)


@formats_and_dtypes
def test_no_row_sees_its_neighbours(format, dtype):
    # ever larger rows, of widths that are and are not multiples of what is loaded at a time
    for cols in (4, 12, 24, 67, 68, 72, 100):
        x = np.random.default_rng(cols).normal(size=(70, cols)) * 2.0 ** np.linspace(-6, 6, 70).reshape(-1, 1)
        check_quantize(x.astype(dtype), format, "native", what=f"{cols} columns")


@formats_and_dtypes
def test_whole_panels_edges_and_the_panels_after_the_first(format, dtype):
    x = np.random.default_rng(0).normal(size=(2, 322, 584)).astype(dtype)
    check_quantize(x, format, "native")
    for axis in ("row", "column"):
        q = gtp.ops.quantize(device(x), format, axis=axis, implementation="native")
        for out in (jnp.float32, jnp.bfloat16, jnp.float16):
            check_dequantize(q, "native", out, axis)


@formats_and_dtypes
def test_whole_panels_alone(format, dtype):
    # an odd number of panels, so that turns of two end in the next row of them
    x = np.random.default_rng(1).normal(size=(256, 1088 if dtype == np.float32 else 1152)).astype(dtype)
    check_quantize(x, format, "native")
    for axis in ("row", "column"):
        check_dequantize(
            gtp.ops.quantize(device(x), format, axis=axis, implementation="native"), "native", jnp.bfloat16
        )


@pytest.mark.parametrize("format", others_full([NVFP4, NVFP4_1D, FP8_E4M3], [NVFP4_1D]), ids=str)
def test_copies_of_a_stack_may_have_amaxes_of_different_shapes(format):
    x = jnp.asarray(np.random.default_rng(4).normal(size=(3, 2, 65, 72)), jnp.bfloat16)
    amaxes = (jnp.asarray([3, 50, 0.5], jnp.float32), jnp.arange(1, 7, dtype=jnp.float32).reshape(3, 2))
    for pair in (amaxes, amaxes[::-1], (amaxes[0], jnp.float32(9)), (jnp.float32(3), jnp.float32(50))):
        both = gtp.ops.quantize(x, format, amax=pair, axis="both", implementation="native")
        for q, axis, amax in zip(both, ("row", "column"), pair, strict=True):
            alone = gtp.ops.quantize(x, format, amax=amax, axis=axis, implementation="native")
            assert_same_bits(q.codes, alone.codes, f"{axis} codes, amax {amax.shape}")
            assert format is FP8_E4M3 or np.array_equal(q.scales, alone.scales), f"{axis} scales, amax {amax.shape}"


@pytest.mark.full
@pytest.mark.parametrize("format", others_full(FORMATS, [NVFP4, FP8_E4M3]), ids=str)
def test_a_layer_of_many_weights_of_several_dtypes(format):
    # more pieces than one launch takes, whose dtypes and orientations alternate
    count = 45
    plan = PackPlan(
        tuple(Piece(rows=32, cols=80, transposed=i % 2 == 1, total_rows=32, out=i, out_row=0) for i in range(count))
    )
    random = np.random.default_rng(3)
    weights = [
        jnp.asarray(random.normal(size=(80, 32) if i % 2 else (32, 80)).astype(DTYPES[i % 3])) for i in range(count)
    ]
    amax = gtp.ops.multi_amax(weights) if format.has_amax else None
    buffer = gtp.ops.pack(weights, format, amax, plan, implementation="native")
    outputs = gtp.ops.unpack(buffer[None], format, amax, plan, jnp.bfloat16, implementation="native")
    for i, (found, weight) in enumerate(zip(outputs, weights, strict=True)):
        own = None if amax is None else amax[i]
        q = gtp.ops.quantize(weight.T if i % 2 else weight, format, amax=own, implementation="native")
        assert_same_bits(found, gtp.ops.dequantize(q, jnp.bfloat16, implementation="native"), f"output {i}")
