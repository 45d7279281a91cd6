"""Bad input to the operations on quantized arrays is refused at the door, by name, with the remedy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import naming

import gtp_jax as gtp
from gtp_jax.formats import FP8_E4M3, MXFP8, NVFP4, NVFP4_1D, PackPlan, Piece

from .conftest import missing_kernels

X = np.ones((4, 32), np.float32)
PIECE = dict(rows=8, cols=32, total_rows=8, out=0, out_row=0)
PLAN = PackPlan((Piece(**PIECE, transposed=True),))
TALL = PackPlan((Piece(**PIECE | {"total_rows": 9}, transposed=False),))
SLICE, AMAX, BUFFER = jnp.ones((32, 8)), jnp.ones(1), jnp.zeros((1, 144), jnp.uint8)
FOUR_WORDS = jax.random.key(0, impl="rbg")

TYPES = {  # what the message must name: the call
    "`x` float64 float32 Cast": lambda: gtp.ops.quantize(X.astype(np.float64), NVFP4),
    "`x` int32 float16": lambda: gtp.ops.quantize(X.astype(np.int32), NVFP4),
    "`format` 'NVFP4' gtp_jax.formats.NVFP4": lambda: gtp.ops.quantize(X, "NVFP4"),
    "`key` int uint32": lambda: gtp.ops.quantize(X, NVFP4, key=3),
    "`amax` bfloat16 float32 `gtp_jax.ops.multi_amax`": lambda: gtp.ops.quantize(X, NVFP4, amax=jnp.bfloat16(1)),
    "`dtype` float64 float16": lambda: gtp.ops.dequantize(gtp.ops.quantize(X, NVFP4), jnp.float64),
    "`arrays` list": lambda: gtp.ops.multi_amax(X),
    "`plan` tuple gtp_jax.formats.PackPlan": lambda: gtp.ops.pack([SLICE], NVFP4, AMAX, ()),
    "`buffer` int8 uint8 `pack`": lambda: gtp.ops.unpack(BUFFER.astype(jnp.int8), NVFP4, AMAX, PLAN),
}
VALUES = {
    "`x` scalar M K": lambda: gtp.ops.quantize(jnp.float32(1), NVFP4),
    "`axis` 1 'row' 'column' 'both'": lambda: gtp.ops.quantize(X, NVFP4, axis=1),
    "`hadamard` NVFP4 'column' NVFP4_1D": lambda: gtp.ops.quantize(X, NVFP4, axis="column", hadamard=True),
    "`hadamard` column-wise NVFP4_1D 'row'": lambda: gtp.ops.quantize(X, NVFP4_1D, hadamard=True),
    "`key` stochastic MXFP8 leave": lambda: gtp.ops.quantize(X, MXFP8, key=jax.random.key(0)),
    "`key` (4,) two jax.random.key(seed, impl=": lambda: gtp.ops.quantize(X, NVFP4, key=FOUR_WORDS),
    "`amax` MXFP8 leave": lambda: gtp.ops.quantize(X, MXFP8, amax=3.0),
    "`amax` (4,) ()": lambda: gtp.ops.quantize(X, NVFP4, amax=jnp.ones(4)),
    "`amax` 2 `axis` 'row' pair 'both'": lambda: gtp.ops.quantize(X, NVFP4, amax=(1.0, 1.0)),
    "`amax` Hadamard pair": lambda: gtp.ops.quantize(X, NVFP4_1D, amax=1.0, axis="both", hadamard=True),
    "`arrays[1]` scalar `stacked`": lambda: gtp.ops.multi_amax([jnp.ones(2), jnp.ones(())], stacked=True),
    "`shards[0]` (8, 32) (32, 8)": lambda: gtp.ops.pack([SLICE.T], NVFP4, AMAX, PLAN),
    "`amax` missing NVFP4": lambda: gtp.ops.pack([SLICE], NVFP4, None, PLAN),
    "`buffer` (144,) (shards, 144) NVFP4": lambda: gtp.ops.unpack(BUFFER[0], NVFP4, AMAX, PLAN),
    "8 2 16 NVFP4 Pad": lambda: gtp.ops.unpack(jnp.tile(BUFFER, (2, 1)), NVFP4, AMAX, PLAN),
    "piece 0 9 1 8": lambda: gtp.ops.unpack(jnp.zeros((1, 256), jnp.uint8), FP8_E4M3, AMAX, TALL),
}


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "error, named, call",
    [(TypeError, *case) for case in TYPES.items()] + [(ValueError, *case) for case in VALUES.items()],
    ids=[*TYPES, *VALUES],
)
def test_bad_argument_is_named(error, named, call):
    with pytest.raises(error, match=naming(named)):
        call()


@pytest.mark.skipif(missing_kernels() is None, reason="the native kernels are here")
def test_native_is_refused_where_it_is_not():
    with pytest.raises(NotImplementedError, match=naming("'multi_amax' 'cpu' Leave")):
        gtp.ops.quantize(X, NVFP4, implementation="native")
