"""Bad input to the operations on quantized arrays is refused at the door, by name, with the remedy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gtp_jax as gtp
from gtp_jax.formats import FP8_E4M3, MXFP8, NVFP4, NVFP4_1D, PackPlan, Piece

from .conftest import missing_kernels

X = np.ones((4, 32), np.float32)
PLAN = PackPlan((Piece(rows=8, cols=32, transposed=True, total_rows=8, out=0, out_row=0),))
SLICE, AMAX, BUFFER = jnp.ones((32, 8)), jnp.ones(1), jnp.zeros((1, 144), jnp.uint8)

WRONG = {
    "float64": (
        lambda: gtp.quantize(X.astype(np.float64), NVFP4),
        TypeError,
        "`x` is float64; it must be float32, bfloat16 or float16. Cast first",
    ),
    "integers": (
        lambda: gtp.quantize(X.astype(np.int32), NVFP4),
        TypeError,
        "`x` is int32; it must be float32, bfloat16",
    ),
    "a list": (lambda: gtp.quantize([1.0, 2.0], NVFP4), TypeError, "`x` is a list; it must be an array of float32"),
    "a scalar": (
        lambda: gtp.quantize(jnp.float32(1), NVFP4),
        ValueError,
        r"`x` is a scalar; its shape must be \(\*lead, M, K\)",
    ),
    "format": (
        lambda: gtp.quantize(X, "NVFP4"),
        TypeError,
        "`format` is 'NVFP4'; it must be one of gtp_jax.formats.NVFP4, ",
    ),
    "axis": (
        lambda: gtp.quantize(X, NVFP4, axis=1),
        ValueError,
        r"`axis` is 1; it must be one of \['row', 'column', 'both'\]",
    ),
    "hadamard format": (
        lambda: gtp.quantize(X, NVFP4, axis="column", hadamard=True),
        ValueError,
        "`hadamard` applies only to the column-wise copy of NVFP4_1D; this is NVFP4 with axis 'column'",
    ),
    "hadamard axis": (
        lambda: gtp.quantize(X, NVFP4_1D, hadamard=True),
        ValueError,
        "`hadamard` applies only to the column-wise copy of NVFP4_1D; this is NVFP4_1D with axis 'row'",
    ),
    "key format": (
        lambda: gtp.quantize(X, MXFP8, key=jax.random.key(0)),
        ValueError,
        "`key` asks for stochastic rounding, which MXFP8 does not support; leave it out",
    ),
    "key type": (
        lambda: gtp.quantize(X, NVFP4, key=3),
        TypeError,
        "`key` is int; it must be a JAX key, or two uint32 words",
    ),
    "key words": (
        lambda: gtp.quantize(X, NVFP4, key=jax.random.key(0, impl="rbg")),
        ValueError,
        r"`key` has words of shape \(4,\); it must have two words. Make it with `jax.random.key\(seed, impl=",
    ),
    "amax format": (
        lambda: gtp.quantize(X, MXFP8, amax=3.0),
        ValueError,
        "`amax` is given, but MXFP8 has only block scales; leave it out",
    ),
    "amax shape": (
        lambda: gtp.quantize(X, NVFP4, amax=jnp.ones(4)),
        ValueError,
        r"`amax` has shape \(4,\); it must be \(\) for the whole tensor, or the first of the leading dimensions \(\)",
    ),
    "amax dtype": (
        lambda: gtp.quantize(X, NVFP4, amax=jnp.bfloat16(1)),
        TypeError,
        "`amax` is bfloat16; it must be float32, as `gtp_jax.multi_amax` returns it",
    ),
    "amax pair": (
        lambda: gtp.quantize(X, NVFP4, amax=(1.0, 1.0)),
        ValueError,
        "`amax` is a sequence of 2, and `axis` is 'row'; pass a pair with axis 'both'",
    ),
    "amax hadamard": (
        lambda: gtp.quantize(X, NVFP4_1D, amax=1.0, axis="both", hadamard=True),
        ValueError,
        "`amax` is a single amax, but the Hadamard transform changes the amax of the column-wise copy. Pass a pair",
    ),
    "implementation": (
        lambda: gtp.quantize(X, NVFP4, implementation="cuda"),
        ValueError,
        "`implementation` is 'cuda'; it must be 'reference', 'native' or None",
    ),
    "dtype": (
        lambda: gtp.dequantize(gtp.quantize(X, NVFP4), jnp.float64),
        TypeError,
        "`dtype` is float64; it must be float32, bfloat16 or float16",
    ),
    "one array": (lambda: gtp.multi_amax(X), TypeError, r"`arrays` is one array; it must be a list of arrays"),
    "an array of many": (
        lambda: gtp.multi_amax([X, X.astype(int)]),
        TypeError,
        r"`arrays\[1\]` is int64; it must be float32",
    ),
    "hadamard scalar": (lambda: gtp.hadamard_amax(jnp.float32(1)), ValueError, "`x` is a scalar"),
    "hadamard integers": (lambda: gtp.hadamard(jnp.arange(3)), TypeError, "`x` is int32; it must be float32"),
    "pack plan": (
        lambda: gtp.pack([SLICE], NVFP4, AMAX, ()),
        TypeError,
        "`plan` is a tuple; it must be a gtp_jax.formats.PackPlan",
    ),
    "pack number": (
        lambda: gtp.pack([], NVFP4, AMAX, PLAN),
        ValueError,
        "`shards` has 0 arrays, but the plan has 1",
    ),
    "pack shape": (
        lambda: gtp.pack([SLICE.T], NVFP4, AMAX, PLAN),
        ValueError,
        r"`shards\[0\]` has shape \(8, 32\); it must be the leading dimensions \(\), followed by the shape \(32, 8\)",
    ),
    "pack dtype": (
        lambda: gtp.pack([SLICE.astype(jnp.int8)], NVFP4, AMAX, PLAN),
        TypeError,
        r"`shards\[0\]` is int8; it must be float32",
    ),
    "pack no amax": (lambda: gtp.pack([SLICE], NVFP4, None, PLAN), ValueError, "`amax` is missing; NVFP4 scales each"),
    "pack amax shape": (
        lambda: gtp.pack([SLICE], NVFP4, jnp.ones(2), PLAN),
        ValueError,
        r"`amax` has shape \(2,\); it must be \(1,\), with one amax per piece of the plan",
    ),
    "pack amax dtype": (
        lambda: gtp.pack([SLICE], NVFP4, jnp.ones(1, jnp.bfloat16), PLAN),
        TypeError,
        "`amax` is bfloat16; it must be a float32 array",
    ),
    "unpack dtype": (
        lambda: gtp.unpack(BUFFER, NVFP4, AMAX, PLAN, jnp.int8),
        TypeError,
        "`dtype` is int8; it must be float32",
    ),
    "unpack buffer": (
        lambda: gtp.unpack(BUFFER.astype(jnp.int8), NVFP4, AMAX, PLAN),
        TypeError,
        "`buffer` is int8; it must be uint8, as `pack` returns it",
    ),
    "unpack shape": (
        lambda: gtp.unpack(BUFFER[0], NVFP4, AMAX, PLAN),
        ValueError,
        r"`buffer` has shape \(144,\); it must be \(shards, 144\) for this plan in NVFP4",
    ),
    "unpack blocks": (
        lambda: gtp.unpack(jnp.tile(BUFFER, (2, 1)), NVFP4, AMAX, PLAN),
        ValueError,
        "piece 0 has shards of 8 rows; with 2 shards they must be a multiple of 16 in NVFP4. Pad them",
    ),
    "unpack rows": (
        lambda: gtp.unpack(
            jnp.zeros((1, 256), jnp.uint8),
            FP8_E4M3,
            AMAX,
            PackPlan((Piece(rows=8, cols=32, transposed=False, total_rows=9, out=0, out_row=0),)),
        ),
        ValueError,
        "piece 0 has 9 rows in total, but 1 shards of 8 hold fewer",
    ),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", WRONG)
def test_bad_argument_is_named(name):
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.skipif(missing_kernels() is None, reason="the native kernels are here")
def test_native_is_refused_where_it_is_not():
    with pytest.raises(NotImplementedError, match="there is no native 'multi_amax' for 'cpu' here: .* Leave `impl"):
        gtp.quantize(X, NVFP4, implementation="native")
