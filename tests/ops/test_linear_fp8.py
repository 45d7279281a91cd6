"""FP8 matmuls multiply what the oracle says the operands are rounded to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import others_full

import gtp_jax as gtp
from gtp_jax.formats import FP8_E4M3, FP8_E5M2
from gtp_jax.ops import SlottedWeight, linear_fp8, power_of_two_amax

from .oracle import rounded

both_gradients = pytest.mark.parametrize("gradients", others_full([FP8_E5M2, FP8_E4M3], [FP8_E5M2]), ids=str)


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(function, g, *operands):
    y, back = jax.vjp(function, *operands)
    return y, *back(g)


@both_gradients
def test_forward_and_backward_multiply_the_rounded_operands(gradients):
    random = np.random.default_rng(0)
    x, w, g = (random.normal(size=s).astype(np.float32) for s in ((3, 20, 48), (40, 48), (3, 20, 40)))
    x, g = x * 7, g * 1e-3  # unequal scales
    y, to_x, to_w = with_gradients(lambda x, w: linear_fp8(x, w, gradients), g, x, w)
    x8, w8 = rounded(x.reshape(60, 48), FP8_E4M3), rounded(w, FP8_E4M3)
    g8 = rounded(g.reshape(60, 40), gradients)
    for found, wanted in ((y, x8 @ w8.T), (to_x, g8 @ w8), (to_w, g8.T @ x8)):
        found = np.asarray(found).reshape(wanted.shape)
        assert np.linalg.norm(found - wanted) <= 1e-6 * np.linalg.norm(wanted)


@both_gradients
def test_codes_that_travelled_are_multiplied_as_the_array_that_they_were_made_of(gradients):
    random = np.random.default_rng(2)
    x, w, g = (jnp.asarray(random.normal(size=s), jnp.float32) for s in ((20, 96), (64, 96), (20, 64)))
    w = jnp.asarray(np.asarray(w) * np.linspace(1e-3, 3, 64, dtype=np.float32)[:, None])
    amax = jax.jit(lambda w: power_of_two_amax(gtp.ops.multi_amax([w]), FP8_E4M3)[0])(w)
    codes, slot = gtp.ops.quantize(w, FP8_E4M3, amax=amax), np.full(w.shape, np.nan, np.float32)
    coded = with_gradients(lambda x, slot: linear_fp8(x, SlottedWeight(codes, slot), gradients), g, x, slot)
    for found, wanted in zip(coded, with_gradients(lambda x, w: linear_fp8(x, w, gradients), g, x, w), strict=True):
        # another program sums in another order
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())


def test_the_rounded_amax_holds_the_amax_and_its_scale_is_a_power_of_two():
    patterns = np.random.default_rng(0).integers(0, 0x7F800001, 10_000, dtype=np.uint32)
    amax = np.append(patterns.view(np.float32), np.float32([0, 448, 449, 2.0**-149, np.inf, np.nan]))
    found = np.asarray(power_of_two_amax(jnp.asarray(amax), FP8_E4M3), np.float64)
    wide = amax.astype(np.float64)
    scaled = (1e-33 < amax) & (amax < 2e38)
    held, powers = (wide * (1 - 2**-22) <= found) & (found < 2 * wide), np.frexp(found / FP8_E4M3.element_max)[0] == 0.5
    assert (held & powers)[scaled].all()
    # no scale, or none that float32 holds as a normal number and 448 of
    assert ((found == wide) | np.isnan(wide) | (wide <= found) & (found < 2 * wide))[~scaled].all()
