"""Matrices of more than 2**32 elements: what lies beyond is what the same numbers give by themselves."""

import jax
import jax.numpy as jnp
import pytest

import gtp_jax as gtp
from gtp_jax.formats import FP8_E4M3, MXFP8, NVFP4, NVFP4_1D, PackPlan, Piece

from ..ops.bits import assert_same_bits

ROWS, COLS = 2**16 + 64, 2**16
TAIL = 64

pytestmark = pytest.mark.gpu
a_format_of_each_kind = pytest.mark.parametrize("format", [NVFP4, NVFP4_1D, MXFP8, FP8_E4M3], ids=str)


@pytest.fixture(scope="module")
def x():
    """No tile is like another in its column, so that what an offset of 32 bits wraps to is not what belongs there."""

    @jax.jit
    def make(base):
        scaled = base[None] * jnp.linspace(1, 1.9, ROWS // TAIL, dtype=jnp.float32)[:, None, None]
        return jnp.reshape(scaled.astype(jnp.bfloat16), (ROWS, COLS)).at[-1, -1].set(30)

    return make(jax.random.normal(jax.random.key(0), (TAIL, COLS)))


def given(format, x):
    return gtp.multi_amax([x], implementation="native")[0] if format.has_amax else None


def test_the_amax_may_be_the_last_element(x):
    assert gtp.multi_amax([x], implementation="native")[0] == 30


@a_format_of_each_kind
def test_quantized_and_dequantized_beyond_32_bits(x, format):
    amax = given(format, x)
    row, column = gtp.quantize(x, format, amax=amax, axis="both", implementation="native")
    last_rows = gtp.quantize(x[-TAIL:], format, amax=amax, implementation="native")
    assert_same_bits(row.codes[-TAIL:], last_rows.codes, "row codes")
    last_columns = gtp.quantize(x[:, -TAIL:], format, amax=amax, axis="column", implementation="native")
    along = (slice(-TAIL, None),) if format.transposed_columns else (slice(None), slice(-TAIL, None))
    assert_same_bits(column.codes[along], last_columns.codes, "column codes")
    if format.block is not None:
        assert row.scales is not None and last_rows.scales is not None
        assert column.scales is not None and last_columns.scales is not None
        assert_same_bits(row.scales[-len(last_rows.scales) :], last_rows.scales, "row scales")
        down = slice(-last_columns.scales.shape[len(along) - 1], None)
        assert_same_bits(column.scales[(*along[:-1], down)], last_columns.scales, "column scales")
    for whole, part, at in ((row, last_rows, slice(-TAIL, None)), (column, last_columns, (..., slice(-TAIL, None)))):
        values = gtp.dequantize(whole, implementation="native")[at]
        assert_same_bits(values, gtp.dequantize(part, implementation="native"), f"columns {whole.columns}")


@a_format_of_each_kind
def test_packed_and_unpacked_beyond_32_bits(x, format):
    def plan(slices):
        return PackPlan((Piece(rows=ROWS // slices, cols=COLS, transposed=False, total_rows=ROWS, out=0, out_row=0),))

    whole = given(format, x)
    amax = None if whole is None else whole[None]
    halves = [gtp.pack([half], format, amax, plan(2), implementation="native") for half in jnp.split(x, 2)]
    (found,) = gtp.unpack(jnp.stack(halves), format, amax, plan(2), implementation="native")
    last = gtp.quantize(x[-TAIL:], format, amax=whole, implementation="native")
    assert_same_bits(found[-TAIL:], gtp.dequantize(last, implementation="native"))
    buffer = gtp.pack([x], format, amax, plan(1), implementation="native")
    (again,) = gtp.unpack(buffer[None], format, amax, plan(1), implementation="native")
    assert_same_bits(again[-TAIL:], found[-TAIL:])
