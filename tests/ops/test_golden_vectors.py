"""Published and hand-checked numbers: blocks of FP4 under several amaxes, and E8M0 scales."""

import jax.numpy as jnp
import numpy as np
import pytest

import gtp_jax as gtp
from gtp_jax.formats import MXFP8, NVFP4, NVFP4_1D

GRID = [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, -6]
INTEGERS = list(range(-8, 8))
TINY = [1e-6, -1e-6, 5e-7] + [0] * 13

# values, amax, scale byte, code bytes
FP4 = {
    "ties": (GRID, 6, 0x7E, "00212243446566f7"),
    "ties, amax 600": (GRID, 600, 0x49, "00112233445566f7"),
    "integers": (INTEGERS, 8, 0x7E, "ffeecdab20436576"),
    "integers, amax 10": (INTEGERS, 10, 0x7B, "ffeecdab20436576"),
    "scale underflows": (TINY, 6, 0x00, "f707000000000000"),
}

E8M0 = {
    448: (127, 0x7E),
    449: (128, 0x76),
    1: (119, 0x78),
    1.75: (119, 0x7E),
    1.7578125: (120, 0x76),
    3.5: (120, 0x7E),
    3e38: (247, 0x76),
    1e-38: (0, 0x3E),
}


@pytest.mark.parametrize("format", [NVFP4, NVFP4_1D], ids=str)
def test_fp4_blocks(format, implementation):
    values, amaxes, scales, codes = zip(*FP4.values(), strict=True)
    x, amax = jnp.array(values, jnp.float32)[:, None], jnp.array(amaxes, jnp.float32)
    q = gtp.ops.quantize(x, format, amax=amax, implementation=implementation)
    assert [row.tobytes().hex() for row in np.asarray(q.codes)] == list(codes)
    assert np.asarray(q.scales).ravel().tolist() == list(scales)
    assert not np.asarray(gtp.ops.dequantize(q, jnp.float32, implementation=implementation))[-1].any()  # underflows


def test_mxfp8_scales_and_codes_of_amaxes(implementation):
    q = gtp.ops.quantize(jnp.array([*E8M0], jnp.float32)[:, None], MXFP8, implementation=implementation)
    found = zip(np.asarray(q.scales).ravel().tolist(), np.asarray(q.codes).ravel().tolist(), strict=True)
    assert list(found) == list(E8M0.values())
