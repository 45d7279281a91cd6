"""Runs the library and the oracle on the same array and compares every byte."""

import math

import jax
import jax.numpy as jnp
import numpy as np

import gtp_jax as gtp
from gtp_jax.formats import QuantizedArray, validate

from . import oracle
from .bits import assert_same_bits, device


def check_quantize(x, format, implementation, *, amax=None, hadamard=False, key=None, what="") -> None:
    """Row-wise and column-wise copy against the oracle's; `x` a numpy array with two dimensions or more."""
    words = None if key is None else device(np.array(key, np.uint32))
    given = None if amax is None else device(np.asarray(amax))
    row, column = gtp.ops.quantize(
        device(x), format, amax=given, axis="both", hadamard=hadamard, key=words, implementation=implementation
    )
    for q, columns in ((row, False), (column, True)):
        validate(q)
        name = f"{what} {'column' if columns else 'row'}"
        transformed = hadamard and columns
        if amax is not None:
            whole = amax
        elif transformed:
            whole = oracle.amax(np.array([oracle.hadamard(m) for m in _matrices(x)]))
        else:
            whole = oracle.amax(x)
        if format.has_amax:
            assert_same_bits(q.amax, np.asarray(whole, np.float32), f"{name} amax")
        codes, scales = oracle.quantize(format.name, x, whole, columns=columns, use_hadamard=transformed, key=key)
        if scales is not None:
            assert_same_bits(q.scales, scales, f"{name} scales")
        assert_same_bits(q.codes, codes, f"{name} codes")


def check_dequantize(q: QuantizedArray, implementation, dtype, what="") -> None:
    """The values of a quantized array against the oracle's."""
    got = gtp.ops.dequantize(q, dtype, implementation=implementation)
    lead = q.codes.shape[:-2]
    whole = np.float32(0) if q.amax is None else np.asarray(q.amax)
    whole = np.broadcast_to(whole.reshape((*whole.shape, *[1] * (len(lead) - whole.ndim))), lead)
    scales = None if q.scales is None else _matrices(q.scales)
    expected = oracle.dequantize(
        q.format.name, _matrices(q.codes), scales, whole.reshape(-1), q.matrix, _numpy(dtype), columns=q.columns
    )
    assert_same_bits(got, expected.reshape(q.shape), f"{what} {q.format.name} {jnp.dtype(dtype)}")


def _numpy(dtype):
    return oracle.BFLOAT16 if dtype == jnp.bfloat16 else np.dtype(dtype).type


def _matrices(array: jax.Array | np.ndarray) -> np.ndarray:
    return np.asarray(array).reshape(math.prod(array.shape[:-2]), *array.shape[-2:])
