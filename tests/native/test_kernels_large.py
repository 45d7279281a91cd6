"""Matrices of more than 2**32 elements: what lies beyond is what the same numbers give by themselves.

All of it is one test, so that of many workers on a GPU only one takes so much of its memory.
"""

import jax
import jax.numpy as jnp
import pytest

import gtp_jax as gtp
from gtp_jax.formats import FP8_E4M3, MXFP8, NVFP4, NVFP4_1D, PackPlan, Piece

from ..ops.bits import assert_same_bits

ROWS, COLS = 2**16 + 256, 2**16
TAIL = 256  # whole panels of every kernel
# The matrix, both copies of its codes and their values: not quite seven bytes an element.
ROOM = 7 * ROWS * COLS


def take_room():
    """The process keeps what memory it once had; other processes may have taken it."""
    try:
        jax.block_until_ready(jnp.zeros(ROOM, jnp.uint8))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        pytest.skip(f"{ROOM >> 30} GiB of the GPU's memory are not free; run it with -n 0, and nothing beside it")


@jax.jit
def matrix(base):
    """No panel is like another in its column, so that what an offset of 32 bits wraps to is not what belongs there."""
    scaled = base[None] * jnp.linspace(1, 1.9, ROWS // TAIL, dtype=jnp.float32)[:, None, None]
    return jnp.reshape(scaled.astype(jnp.bfloat16), (ROWS, COLS)).at[-1, -1].set(30)


def check_quantized_and_dequantized(x, amax, format):
    row, column = gtp.ops.quantize(x, format, amax=amax, axis="both", implementation="native")
    last_rows = gtp.ops.quantize(x[-TAIL:], format, amax=amax, implementation="native")
    assert_same_bits(row.codes[-TAIL:], last_rows.codes, f"{format}: row codes")
    last_columns = gtp.ops.quantize(x[:, -TAIL:], format, amax=amax, axis="column", implementation="native")
    along = (slice(-TAIL, None),) if format.transposed_columns else (slice(None), slice(-TAIL, None))
    assert_same_bits(column.codes[along], last_columns.codes, f"{format}: column codes")
    if format.block is not None:
        assert row.scales is not None and last_rows.scales is not None
        assert column.scales is not None and last_columns.scales is not None
        assert_same_bits(row.scales[-len(last_rows.scales) :], last_rows.scales, f"{format}: row scales")
        down = slice(-last_columns.scales.shape[len(along) - 1], None)
        assert_same_bits(column.scales[(*along[:-1], down)], last_columns.scales, f"{format}: column scales")
    for whole, part, at in ((row, last_rows, slice(-TAIL, None)), (column, last_columns, (..., slice(-TAIL, None)))):
        values = gtp.ops.dequantize(whole, implementation="native")[at]
        last = gtp.ops.dequantize(part, implementation="native")
        assert_same_bits(values, last, f"{format}: values, columns {whole.columns}")


def check_packed_and_unpacked(x, amax, format):
    amaxes = None if amax is None else amax[None]
    last = gtp.ops.dequantize(
        gtp.ops.quantize(x[-TAIL:], format, amax=amax, implementation="native"), implementation="native"
    )
    for slices in (1, 2):
        rows = ROWS // slices
        plan = PackPlan((Piece(rows=rows, cols=COLS, transposed=False, total_rows=ROWS, out=0, out_row=0),))
        parts = (x if slices == 1 else x[i * rows : (i + 1) * rows] for i in range(slices))
        buffer = jnp.stack([gtp.ops.pack([part], format, amaxes, plan, implementation="native") for part in parts])
        (values,) = gtp.ops.unpack(buffer, format, amaxes, plan, implementation="native")
        assert_same_bits(values[-TAIL:], last, f"{format}: {slices} slices")
        del values


@pytest.mark.gpu
def test_what_lies_beyond_32_bits_is_as_by_itself():
    take_room()
    x = matrix(jax.random.normal(jax.random.key(0), (TAIL, COLS)))
    amax = gtp.ops.multi_amax([x], implementation="native")[0]
    assert amax == 30
    for format in (NVFP4, NVFP4_1D, MXFP8, FP8_E4M3):
        given = amax if format.has_amax else None
        check_quantized_and_dequantized(x, given, format)
        check_packed_and_unpacked(x, given, format)
