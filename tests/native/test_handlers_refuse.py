"""Handlers called past the checks of `gtp_jax.ops`: an error in Python, never a crash."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gtp_jax as gtp
from gtp_jax import native
from gtp_jax.formats import FP8_E4M3, MXFP8, NVFP4, NVFP4_1D

pytestmark = pytest.mark.skipif(not native.has("gtp_quantize", "cpu"), reason=native.describe())

U8 = jnp.uint8


def shape(*dims: int, dtype=U8) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


X = jnp.ones((32, 64), jnp.bfloat16)
ONE, KEY = jnp.ones(()), jnp.zeros(2, jnp.uint32)
NO = shape(0)
QUANTIZE = dict(format=np.int32(NVFP4.code), hadamard=False, stochastic=False, rows=True, columns=False)
GOOD = [shape(32, 32), shape(2, 4), NO, NO]
DEQUANTIZE = dict(format=np.int32(NVFP4.code), columns=False)
TABLE = np.array([32, 64, 0, 32, 0, 0, 0, 0], np.int64)
PARTS = {"parts": np.array([1], np.int64)}
PACK = dict(format=np.int32(NVFP4.code), table=TABLE)

UNPACK = {**PACK, "by_shard": False}

CASES = {
    "dtype": (
        "gtp_quantize",
        GOOD,
        [X.astype(jnp.int32), ONE, ONE, KEY],
        QUANTIZE,
        "it must be float32, bfloat16 or float16",
    ),
    "one dimension": ("gtp_quantize", GOOD, [X[0], ONE, ONE, KEY], QUANTIZE, r"x has shape \(64\)"),
    "codes": (
        "gtp_quantize",
        [shape(32, 31), *GOOD[1:]],
        [X, ONE, ONE, KEY],
        QUANTIZE,
        r"row codes has .*it must be \(32, 32\)",
    ),
    "scales": ("gtp_quantize", [GOOD[0], shape(32, 4), NO, NO], [X, ONE, ONE, KEY], QUANTIZE, r"row scales .*\(2, 4\)"),
    "signed codes": (
        "gtp_quantize",
        [shape(32, 32, dtype=jnp.int8), *GOOD[1:]],
        [X, ONE, ONE, KEY],
        QUANTIZE,
        "not uint8",
    ),
    "amax": ("gtp_quantize", GOOD, [X, jnp.ones(3), ONE, KEY], QUANTIZE, r"amax has shape \(3\)"),
    "amax dtype": ("gtp_quantize", GOOD, [X, jnp.ones((), jnp.int32), ONE, KEY], QUANTIZE, "amax is not float32"),
    "key": ("gtp_quantize", GOOD, [X, ONE, ONE, KEY[:1]], {**QUANTIZE, "stochastic": True}, "key must be two words"),
    "format": ("gtp_quantize", GOOD, [X, ONE, ONE, KEY], {**QUANTIZE, "format": np.int32(6)}, "format is 6"),
    "hadamard": ("gtp_quantize", GOOD, [X, ONE, ONE, KEY], {**QUANTIZE, "hadamard": True}, "cannot be used with NVFP4"),
    "stochastic": (
        "gtp_quantize",
        GOOD,
        [X, ONE, ONE, KEY],
        {**QUANTIZE, "format": np.int32(MXFP8.code), "stochastic": True},
        "stochastic rounding cannot be used with MXFP8",
    ),
    "column codes": (
        "gtp_quantize",
        [*GOOD[:2], shape(64, 15), shape(64, 2)],
        [X, ONE, ONE, KEY],
        {**QUANTIZE, "format": np.int32(NVFP4_1D.code), "rows": False, "columns": True},
        r"column codes .*\(64, 16\)",
    ),
    "other scales": (
        "gtp_dequantize",
        shape(32, 64, dtype=jnp.float32),
        [jnp.zeros((32, 32), U8), jnp.zeros((32, 4), U8), ONE],
        DEQUANTIZE,
        r"scales has shape \(32, 4\); it must be \(2, 4\)",
    ),
    "double": (
        "gtp_dequantize",
        shape(32, 64, dtype=jnp.int32),
        [jnp.zeros((32, 32), U8), jnp.zeros((2, 4), U8), ONE],
        DEQUANTIZE,
        "x has XLA's element type",
    ),
    "fp8 codes": (
        "gtp_dequantize",
        shape(32, 64, dtype=jnp.float32),
        [jnp.zeros((32, 32), U8), jnp.zeros(0, U8), ONE],
        {**DEQUANTIZE, "format": np.int32(FP8_E4M3.code)},
        r"codes has shape \(32, 32\); it must be \(32, 64\)",
    ),
    "shards": ("gtp_pack", shape(1040), [jnp.ones(1)], PACK, "there are 0 shards; the plan's pieces lie in 1"),
    "shard": (
        "gtp_pack",
        shape(1040),
        [jnp.ones(1), X.T],
        PACK,
        r"shard 0 has shape \(64, 32\); piece 0 is matrix 0 of \(32, 64\)",
    ),
    "matrix": (
        "gtp_pack",
        shape(1040),
        [jnp.ones(1), jnp.stack([X, X])],
        {**PACK, "table": np.array([32, 64, 0, 32, 0, 0, 0, 2], np.int64)},
        r"shard 0 has shape \(2, 32, 64\); piece 0 is matrix 2 of \(2, 32, 64\)",
    ),
    "buffer": ("gtp_pack", shape(1041), [jnp.ones(1), X], PACK, r"buffer has shape \(1041\); it must be \(1040\)"),
    "buffers": (
        "gtp_pack_apart",
        [shape(1, 1040)],
        [jnp.ones((2, 1)), jnp.stack([X, X])],
        PACK,
        "there are 1 buffers for 2 layers",
    ),
    "layers": ("gtp_pack_apart", [shape(1, 1040)], [jnp.ones(1), X], PACK, "amax does not have one element per layer"),
    "a layer's buffer": (
        "gtp_pack_apart",
        [shape(1040)],
        [jnp.ones((1, 1)), X[None]],
        PACK,
        r"buffer has shape \(1040\); it must be \(1, 1040\)",
    ),
    "pieces": ("gtp_pack", shape(1040), [jnp.ones(2), X], PACK, "amax does not have one element per piece"),
    "table": (
        "gtp_pack",
        shape(1040),
        [jnp.ones(1), X],
        {**PACK, "table": TABLE[:5]},
        "not have eight numbers per piece",
    ),
    "negative": ("gtp_pack", shape(1040), [jnp.ones(1), X], {**PACK, "table": -TABLE}, "negative number"),
    "weights": (
        "gtp_unpack",
        [shape(31, 64, dtype=jnp.float32)],
        [jnp.zeros((1, 1040), U8), jnp.ones(1)],
        UNPACK,
        r"output 0 has shape \(31, 64\), which does not fit piece 0",
    ),
    "too few rows": (
        "gtp_unpack",
        [shape(64, 64, dtype=jnp.float32)],
        [jnp.zeros((1, 1040), U8), jnp.ones(1)],
        {**UNPACK, "table": np.array([32, 64, 0, 64, 0, 0, 0, 0], np.int64)},
        "the shards have fewer rows in all than total_rows of piece 0",
    ),
    "a row that wraps": (
        "gtp_unpack",
        [shape(32, 64, dtype=jnp.float32)],
        [jnp.zeros((1, 1040), U8), jnp.ones(1)],
        {**UNPACK, "table": np.array([32, 64, 0, 32, 0, 2**63 - 20, 0, 0], np.int64)},
        r"a number beyond 2\*\*40",
    ),
    "a size beyond all": (
        "gtp_unpack",
        [shape(1, 64, dtype=jnp.float32)],
        [jnp.zeros((1, 0), U8), jnp.ones(1)],
        {**UNPACK, "table": np.array([2**40, 64, 0, 1, 0, 0, 0, 0], np.int64)},
        r"more than 2\*\*40 elements",
    ),
    "rows of no piece": (
        "gtp_unpack",
        [shape(33, 64, dtype=jnp.float32)],
        [jnp.zeros((1, 1040), U8), jnp.ones(1)],
        UNPACK,
        r"output 0 has shape \(33, 64\), but its pieces have 32 rows",
    ),
    "output of no piece": (
        "gtp_unpack",
        [shape(32, 64, dtype=jnp.float32), shape(5, 5, dtype=jnp.float32)],
        [jnp.zeros((1, 1040), U8), jnp.ones(1)],
        UNPACK,
        r"output 1 has shape \(5, 5\), but its pieces have 0 rows",
    ),
    "output that is not there": (
        "gtp_unpack",
        [shape(32, 64, dtype=jnp.float32)],
        [jnp.zeros((1, 1040), U8), jnp.ones(1)],
        {**UNPACK, "table": np.array([32, 64, 0, 32, 5, 0, 0, 0], np.int64)},
        "Index out of range",
    ),
    "amax size": ("gtp_multi_amax", shape(2, dtype=jnp.float32), [X], PARTS, "not have one element per part"),
    "parts without end": (
        "gtp_multi_amax",
        shape(1, dtype=jnp.float32),
        [jnp.zeros(0)],
        {"parts": np.array([2**40], np.int64)},
        "not have one element per part",
    ),
    "less than no parts": (
        "gtp_multi_amax",
        shape(1, dtype=jnp.float32),
        [X, X],
        {"parts": np.array([-1, 2], np.int64)},
        "not have one element per part",
    ),
    "no parts": ("gtp_multi_amax", shape(1, dtype=jnp.float32), [X, X], PARTS, "parts must be one number per array"),
    "uneven parts": (
        "gtp_multi_amax",
        shape(3, dtype=jnp.float32),
        [X],
        {"parts": np.array([3], np.int64)},
        "array 0 cannot be divided into 3 equal parts",
    ),
}


CODES, SCALES, WORK = jnp.zeros((128, 256), U8), jnp.ones((2, 128)), shape(1024)
RUNS = [shape(128, 256), shape(2, 128, dtype=jnp.float32), NO, shape(0, dtype=jnp.float32)]
OUT = [shape(128, 128, dtype=jnp.float32), WORK]
KERNELS, ONES = jnp.zeros((1, 2, 128, 256), U8), jnp.ones(2, jnp.int32)
ROWS = [CODES, SCALES, KERNELS, jnp.ones((2, 1, 2)), ONES, ONES, ONES]
PRODUCT = "gtp_grouped_blocked_product", shape(128, 128, dtype=jnp.float32)
OUTER = "gtp_grouped_blocked_outer", shape(2, 128, 128, dtype=jnp.float32)
CUDA_CASES = {
    "runs of part of a block": (
        "gtp_quantize_runs",
        RUNS,
        [jnp.ones((128, 200))],
        dict(rows=True, columns=False),
        "x must have sizes of multiples of 128",
    ),
    "runs of nothing": (
        "gtp_quantize_runs",
        RUNS,
        [jnp.ones((128, 256))],
        dict(rows=False, columns=False),
        "at least one copy must be requested",
    ),
    "scales of runs": (
        "gtp_quantize_runs",
        [RUNS[0], shape(128, 2, dtype=jnp.float32), *RUNS[2:]],
        [jnp.ones((128, 256))],
        dict(rows=True, columns=False),
        r"row_scales has shape \(128, 2\), not \(2, 128\)",
    ),
    "contractions that differ": (
        "gtp_blocked_product",
        OUT,
        [CODES, SCALES, CODES[:, :128], SCALES],
        dict(tiles=False),
        "right has",
    ),
    "scales of tiles": (
        "gtp_blocked_product",
        OUT,
        [CODES, SCALES, CODES, jnp.ones((1, 2))],
        dict(tiles=True),
        r"right_scales has shape \(1, 2\), not \(1, 4\)",
    ),
    "result in float16": (
        "gtp_blocked_product",
        [shape(128, 128, dtype=jnp.float16), WORK],
        [CODES, SCALES, CODES, SCALES],
        dict(tiles=False),
        "the result must be float32 or bfloat16",
    ),
    "grouped: values": (
        *PRODUCT,
        [CODES.astype(jnp.bfloat16), *ROWS[1:2], KERNELS.astype(jnp.bfloat16), *ROWS[3:]],
        {},
        "must be uint8",
    ),
    "grouped: scales of rows": (
        *PRODUCT,
        [CODES, SCALES.T, *ROWS[2:]],
        {},
        r"left_scales has shape \(128, 2\), not \(2, 128\)",
    ),
    "grouped: scales of tiles": (
        *PRODUCT,
        [*ROWS[:3], jnp.ones((3, 1, 2)), *ROWS[4:]],
        {},
        r"right_scales has shape \(3, 1, 2\), not \(2, 1, 2\)",
    ),
    "grouped: tiles": (*PRODUCT, [*ROWS[:6], ONES[:1]], {}, "stops must have one element per tile"),
    "grouped: result in float16": (
        PRODUCT[0],
        shape(128, 128, dtype=jnp.float16),
        ROWS,
        {},
        "the result must be float32 or bfloat16",
    ),
    "sums over part of a block": (
        *OUTER,
        [CODES[:, :64], SCALES, CODES[:, :64], SCALES, ONES, ONES],
        {},
        "a multiple of 128",
    ),
    "sums: scales": (
        *OUTER,
        [CODES, SCALES, CODES, SCALES[:1], ONES, ONES],
        {},
        r"right_scales has shape \(1, 128\), not \(2, 128\)",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_call_is_an_error_in_python(case):
    target, results, operands, attributes, message = CASES[case]
    call = jax.ffi.ffi_call(target, results)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(jax.jit(lambda *xs: call(*xs, **attributes))(*operands))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CUDA_CASES)
def test_a_wrong_call_of_a_handler_for_gpus_is_an_error_in_python(case):
    target, results, operands, attributes, message = CUDA_CASES[case]
    call = jax.ffi.ffi_call(target, results)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(jax.jit(lambda *xs: call(*xs, **attributes))(*operands))


def test_the_process_works_on_after_a_refusal():
    assert gtp.quantize(X, NVFP4, implementation="native").codes.shape == (32, 32)
