"""Handlers called past the checks of `gtp_jax.ops`: an error in Python, never a crash."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import naming

import gtp_jax as gtp
from gtp_jax import native
from gtp_jax.formats import FP8_E4M3, NVFP4, NVFP4_1D

pytestmark = pytest.mark.skipif(not native.has("gtp_quantize", "cpu"), reason=native.describe())


def array(*dims: int, dtype=np.uint8, value=0) -> np.ndarray:
    return np.full(dims, value, dtype)


def shape(*dims: int, dtype=np.uint8) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def floats(*dims: int) -> jax.ShapeDtypeStruct:
    return shape(*dims, dtype=np.float32)


X = array(32, 64, dtype=jnp.bfloat16, value=1)
ONE, ONES, KEY, NO = np.float32(1), np.ones(1, np.float32), array(2, dtype=np.uint32), shape(0)
GOOD = [shape(32, 32), shape(2, 4), NO, NO]
FOUR_BITS, BLOCKS, BUFFER = array(32, 32), array(2, 4), array(1, 1040)
COLUMNS = dict(rows=False, columns=True)


def quantize(results=GOOD, x=X, amax=ONE, key=KEY, format=NVFP4, **attributes):
    common = dict(format=np.int32(getattr(format, "code", format)), hadamard=False, stochastic=False)
    attributes = common | dict(rows=True, columns=False) | attributes
    return "gtp_quantize", results, [x, amax, ONE, key], attributes


VALUES = floats(32, 64)


def dequantize(result=VALUES, scales=BLOCKS, format=NVFP4):
    return "gtp_dequantize", result, [FOUR_BITS, scales, ONE], dict(format=np.int32(format.code), columns=False)


def table(rows=32, total_rows=32, out=0, out_row=0, matrix=0):
    return np.array([rows, 64, 0, total_rows, out, out_row, 0, matrix], np.int64)


PIECE, OF_PIECE = table(), shape(1040)


def pack(*operands, buffer=OF_PIECE, table=PIECE, apart=False):
    name = "gtp_pack_apart" if apart else "gtp_pack"
    return name, [buffer] if apart else buffer, operands, dict(format=np.int32(NVFP4.code), table=table)


def unpack(*results, buffer=BUFFER, table=PIECE):
    return "gtp_unpack", [*results], [buffer, ONES], dict(format=np.int32(NVFP4.code), table=table, by_shard=False)


def multi_amax(count, arrays, parts):
    return "gtp_multi_amax", floats(count), arrays, {"parts": np.array(parts, np.int64)}


LAYERS = np.ones((2, 1), np.float32), np.stack([X, X])
CASES = {  # what the message must name: the call
    "float32 bfloat16 float16": quantize(x=X.astype(np.int32)),
    "x (64)": quantize(x=X[0]),
    "id one int32": ("gtp_stamp", shape(1, dtype=np.int32), [array(2, dtype=np.int32)], {}),
    "result one int32": ("gtp_stamp", shape(1, dtype=np.uint32), [array(1, dtype=np.int32)], {}),
    "row codes (32, 31) (32, 32)": quantize([shape(32, 31), *GOOD[1:]]),
    "row scales (32, 4) (2, 4)": quantize([GOOD[0], shape(32, 4), NO, NO]),
    "codes uint8": quantize([shape(32, 32, dtype=np.int8), *GOOD[1:]]),
    "amax (3)": quantize(amax=np.ones(3, np.float32)),
    "amax float32": quantize(amax=np.int32(1)),
    "key two": quantize(key=KEY[:1], stochastic=True),
    "format 6": quantize(format=6),
    "cannot NVFP4": quantize(hadamard=True),
    "column codes (64, 16)": quantize([*GOOD[:2], shape(64, 15), shape(64, 2)], format=NVFP4_1D, **COLUMNS),
    "scales (32, 4) (2, 4)": dequantize(scales=array(32, 4)),
    "codes (32, 32) (32, 64)": dequantize(scales=array(0), format=FP8_E4M3),
    "0 shards 1": pack(ONES),
    "shard 0 piece 0 (64, 32) (32, 64)": pack(ONES, X.T),
    "shard 0 matrix 2 of (2, 32, 64)": pack(ONES, np.stack([X, X]), table=table(matrix=2)),
    "buffer (1041) (1040)": pack(ONES, X, buffer=shape(1041)),
    "1 buffers 2 layers": pack(*LAYERS, buffer=shape(1, 1040), apart=True),
    "amax element layer": pack(ONES, X, buffer=shape(1, 1040), apart=True),
    "buffer (1040) (1, 1040)": pack(ONES[None], X[None], apart=True),
    "amax element piece": pack(np.ones(2, np.float32), X),
    "eight numbers piece": pack(ONES, X, table=table()[:5]),
    "negative number": pack(ONES, X, table=-table()),
    "output 0 (31, 64) piece 0": unpack(floats(31, 64)),
    "total_rows piece 0": unpack(floats(64, 64), table=table(total_rows=64)),
    "number beyond 2**40": unpack(floats(32, 64), table=table(out_row=2**63 - 20)),
    "elements 2**40": unpack(floats(1, 64), buffer=array(1, 0), table=table(rows=2**40, total_rows=1)),
    "output 0 (33, 64) 32": unpack(floats(33, 64)),
    "Index range": unpack(floats(32, 64), table=table(out=5)),
    "element part": multi_amax(2, [X], [1]),
    "one element per part": multi_amax(1, [np.zeros(0, np.float32)], [2**40]),
    "parts number array": multi_amax(1, [X, X], [1]),
    "array 0 3 parts": multi_amax(3, [X], [3]),
}

CODES, SCALES, WORK = array(128, 256), np.ones((2, 128), np.float32), shape(1024)
KERNELS, TILES = array(1, 2, 128, 256), np.ones(2, np.int32)
ROWS = [CODES, SCALES, KERNELS, np.ones((2, 1, 2), np.float32), TILES, TILES, TILES]
IN_BFLOAT16 = [CODES.astype(jnp.bfloat16), SCALES, KERNELS.astype(jnp.bfloat16), *ROWS[3:]]


WHOLE, OF_ROWS = np.ones((128, 256), np.float32), floats(2, 128)


def runs(x=WHOLE, scales=OF_ROWS, rows=True):
    results = [shape(128, 256), scales, NO, floats(0)]
    return "gtp_quantize_runs", results, [x], dict(rows=rows, columns=False)


def product(right, scales=SCALES, tiles=False, dtype=np.float32):
    result = [shape(128, 128, dtype=dtype), WORK]
    return "gtp_blocked_product", result, [CODES, SCALES, right, scales], dict(tiles=tiles)


def grouped(*operands, dtype=np.float32):
    return "gtp_grouped_blocked_product", shape(128, 128, dtype=dtype), operands, {}


def outer(codes, scales):
    return "gtp_grouped_blocked_outer", floats(2, 128, 128), [codes, SCALES, codes, scales, TILES, TILES], {}


CUDA_CASES = {
    "x sizes of multiples of 128": runs(np.ones((128, 200), np.float32)),
    "copy requested": runs(rows=False),
    "row_scales (128, 2) (2, 128)": runs(scales=floats(128, 2)),
    "right": product(CODES[:, :128]),
    "right_scales (1, 2) (1, 4)": product(CODES, np.ones((1, 2), np.float32), tiles=True),
    "result float32 bfloat16": product(CODES, dtype=np.float16),
    "uint8": grouped(*IN_BFLOAT16),
    "left_scales (128, 2) (2, 128)": grouped(CODES, SCALES.T, *ROWS[2:]),
    "right_scales (3, 1, 2) (2, 1, 2)": grouped(*ROWS[:3], np.ones((3, 1, 2), np.float32), *ROWS[4:]),
    "stops element tile": grouped(*ROWS[:6], TILES[:1]),
    "the result float32 bfloat16": grouped(*ROWS, dtype=np.float16),
    "multiple of 128": outer(CODES[:, :64], SCALES),
    "right_scales (1, 128) (2, 128)": outer(CODES, SCALES[:1]),
}


def check_refused(named, target, results, operands, attributes):
    call = jax.ffi.ffi_call(target, results)
    with pytest.raises(jax.errors.JaxRuntimeError, match=naming(named)):
        jax.block_until_ready(jax.jit(lambda *xs: call(*xs, **attributes))(*operands))


@pytest.mark.parametrize("named", CASES)
def test_a_wrong_call_is_an_error_in_python_after_which_the_process_works_on(named):
    check_refused(named, *CASES[named])
    assert gtp.ops.quantize(jnp.asarray(X), NVFP4, implementation="native").codes.shape == (32, 32)


@pytest.mark.gpu
@pytest.mark.parametrize("named", CUDA_CASES)
def test_a_wrong_call_of_a_handler_for_gpus_is_an_error_in_python(named):
    check_refused(named, *CUDA_CASES[named])
