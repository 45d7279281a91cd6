"""The reference's float32 arithmetic is numpy's, bit for bit, on the whole range: subnormals, overflow, ties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gtp_jax.ops.reference import _ieee

from .bits import assert_same_bits, bits_of, every_pattern

_SPECIAL = [0.0, 2.0**-149, 2.0**-148, 2.0**-127, 2.0**-126, 1.5 * 2.0**-126, 1e-30, 1.0, 3.0, 2688.0, 1e30, 3.4e38]


def magnitudes(count: int, seed: int) -> np.ndarray:
    """Finite magnitudes of all exponents, evenly, and the special ones."""
    random = np.random.default_rng(seed)
    patterns = random.integers(0, 0x7F800000, count, dtype=np.uint32)
    patterns[: count // 4] &= 0x7FFFFF >> random.integers(0, 23, count // 4).astype(np.uint32)  # subnormals
    patterns[-12:] = bits_of(np.array(_SPECIAL, np.float32))
    return patterns.view(np.float32)


def pairs() -> tuple[np.ndarray, np.ndarray]:
    a, b = magnitudes(1 << 16, 1), magnitudes(1 << 16, 2)
    special = np.array(_SPECIAL + [np.finfo(np.float32).max], np.float32)
    return np.append(a, np.repeat(special, len(special))), np.append(b, np.tile(special, len(special)))


def run(function, *operands: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(function)(*(jnp.asarray(x.view(np.int32)) for x in operands))).view(np.float32)


@pytest.mark.full
def test_products_quotients_and_sums():
    a, b = pairs()
    random = np.random.default_rng(4)
    c, d = (x * random.choice(np.array([-1, 1], np.float32), x.shape) for x in (a, b))
    near = (bits_of(c) ^ np.uint32(0x80000003)).view(np.float32)  # almost cancels
    near = np.where(np.isfinite(near), near, 0)
    with np.errstate(all="ignore"):
        assert_same_bits(run(_ieee.multiply, a, b), a * b)
        assert_same_bits(run(_ieee.divide, a, b), np.where(b == 0, np.float32(np.inf), a / b))
        assert_same_bits(run(_ieee.add, c, d), c + d)
        assert_same_bits(run(_ieee.add, c, near), c + near, "cancelling")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=["float32", "bfloat16", "float16"])
def test_narrowing_rounds_to_nearest_even(dtype):
    edges = np.arange(0, 1 << 32, 4093, dtype=np.uint64).astype(np.uint32)
    halves = (np.arange(65536, dtype=np.uint32) << 16)[:, None] + np.array([0x7FFF, 0x8000, 0x8001], np.uint32)
    ties = every_pattern(np.float16).astype(np.float32).view(np.uint32)[:, None] + np.array([0xFFF, 0x1000, 0x1001])
    bits = np.concatenate([edges, halves.ravel(), ties.astype(np.uint32).ravel()])
    wide = bits.view(np.float32)
    got = np.asarray(jax.jit(_ieee.narrow, static_argnums=1)(jnp.asarray(bits.view(np.int32)), jnp.dtype(dtype)))
    with np.errstate(all="ignore"):
        expected = wide.astype(dtype)
    number = ~np.isnan(wide)
    assert_same_bits(got[number], expected[number])
    canonical = {"float32": 0x7FC00000, "bfloat16": 0x7FC0, "float16": 0x7E00}[got.dtype.name]
    assert set(bits_of(got[~number]).tolist()) == {canonical}
