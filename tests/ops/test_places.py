"""Rows at several places, sums over places, shares ahead of the second matmul: values, gradients and bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import naming
from selection import others_full, pairwise

import gtp_jax as gtp
from gtp_jax.formats import FP8_E4M3, FP8_E5M2, MXFP8
from gtp_jax.ops import (
    dequantize,
    expand,
    grouped_fp8,
    grouped_quantized,
    quantize,
    rows_in_codes,
    shares_of_places,
    sum_of_places,
    weighted_glu,
)

from . import experts

TOKENS, TOP_K, GROUPS = 24, 3, 5


def window_and_sizes(seed, present=1.0):
    return experts.window_and_sizes(np.random.default_rng(seed), TOKENS, TOP_K, GROUPS, present)


def matrices(seed, *shapes, dtype=None):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


@pytest.mark.parametrize("present", [1.0, 0.6])
def test_sums_and_shares_have_the_gradients_of_their_definition(present, x64):
    window, _ = window_and_sizes(0, present)
    y, shares, weight = matrices(1, (TOKENS * TOP_K, 8), (TOKENS, TOP_K), (TOKENS, 8))
    here, places = np.asarray(window.here), np.asarray(window.places)
    matrix = np.zeros((TOKENS, TOKENS * TOP_K))  # which place counts for which row
    for row in range(TOKENS):
        for choice in range(TOP_K):
            if here[row, choice]:
                matrix[row, places[row, choice]] += 1

    def found(y, shares):
        return jnp.sum(weight * sum_of_places(y * shares_of_places(shares, window)[:, None], window))

    def wanted(y, shares):
        return jnp.sum(weight * (matrix @ (y * jnp.ravel(shares)[window.pairs][:, None])))

    for a, b in zip(*(jax.jit(jax.grad(f, argnums=(0, 1)))(y, shares) for f in (found, wanted)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)


@pytest.mark.full
def test_a_rolled_window_has_the_same_rows_at_other_places():
    window, sizes = window_and_sizes(2, 0.6)
    (y,) = matrices(3, (TOKENS * TOP_K, 8))
    by = jnp.int32(sizes[0] + sizes[1])
    rolled = window.rolled(by)
    np.testing.assert_array_equal(rolled.rows, jnp.roll(window.rows, -by))
    np.testing.assert_array_equal(rolled.real, jnp.roll(window.real, -by))
    summed = lambda window: functools.partial(sum_of_places, window=window)  # noqa: E731
    found, wanted = jax.vjp(summed(rolled), jnp.roll(y, -by, axis=0)), jax.vjp(summed(window), y)
    np.testing.assert_array_equal(found[0], wanted[0])
    (g,) = matrices(12, (TOKENS, 8))
    g = g.astype(y.dtype)
    np.testing.assert_array_equal(found[1](g)[0], jnp.roll(wanted[1](g)[0], -by, axis=0))  # zeros where nothing is


@pytest.mark.parametrize("given, gradients", pairwise(["codes", "rows"], [FP8_E5M2, FP8_E4M3], usual=1), ids=str)
def test_codes_that_move_are_the_codes_of_rows_that_moved(given, gradients):
    """Rounded ahead of their places or there: the same bits, as the scale is that of the same numbers."""
    window, sizes = window_and_sizes(4)
    x, g, weight = (a.astype(jnp.float32) for a in matrices(5, (TOKENS, 16), (TOKENS, 32), (1, GROUPS, 32, 16)))

    def moved(x, weight):
        return grouped_fp8(
            rows_in_codes(x, FP8_E4M3) if given == "codes" else x, weight, sizes, gradients, taken=window, summed=window
        )

    def there(x, weight):
        return sum_of_places(grouped_fp8(expand(x, window), weight, sizes, gradients), window)

    def with_gradients(call):
        y, back = jax.vjp(call, x, weight)
        return y, *back(g)

    for a, b in zip(*(jax.jit(with_gradients, static_argnums=0)(call) for call in (moved, there)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.full
@pytest.mark.parametrize(
    "name, given", others_full([("MXFP8", "rows"), ("MXFP8", "codes"), ("NVFP4", "rows")], [("MXFP8", "codes")])
)
def test_blocks_of_rows_that_moved_are_made_of_their_codes(name, given, x64):
    """MXFP8's wgrad multiplies what becomes of the codes' values, rounded along rows; NVFP4's of the rows' own."""
    recipe = {"MXFP8": gtp.MXFP8(matmuls=True), "NVFP4": gtp.NVFP4(matmuls=True)}[name]
    operands, key = recipe.operands, jnp.array([1, 2], jnp.uint32)
    assert operands.rounds_input_once is (name == "MXFP8")
    window, sizes = window_and_sizes(14, 0.7)
    x, g, weight = matrices(15, (TOKENS, 64), (TOKENS * TOP_K, 32), (1, GROUPS, 32, 64))
    x, weight = x * np.exp(4 * matrices(16, (1, 64))[0]), weight.astype(jnp.bfloat16).astype(jnp.float64)

    def moved(x, weight):
        rows = rows_in_codes(x, operands.activation) if given == "codes" else x
        return grouped_quantized(rows, weight, sizes, key, operands, taken=window)

    def there(x, weight):
        return grouped_quantized(expand(x, window), weight, sizes, key, operands)

    rounded = dequantize(quantize(x.astype(jnp.float32), MXFP8), jnp.float32).astype(x.dtype)
    y, back = jax.vjp(moved, x, weight)
    # rounded again, values of codes are the same
    wanted, wanted_back = jax.vjp(there, rounded if name == "MXFP8" else x, weight)
    np.testing.assert_array_equal(y, wanted)
    for a, b in zip(back(g), wanted_back(g), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("given", "multiplied"), [("MXFP8", "NVFP4"), ("FP8_E4M3", "MXFP8"), ("MXFP8", "FP8")])
def test_codes_of_another_format_are_refused(given, multiplied):
    window, sizes = window_and_sizes(17)

    def product(x, weight, key):
        rows = rows_in_codes(x, gtp.formats.FORMATS[given])
        if multiplied == "FP8":
            return grouped_fp8(rows, weight, sizes, FP8_E4M3, taken=window)
        operands = {"MXFP8": gtp.MXFP8(matmuls=True), "NVFP4": gtp.NVFP4(matmuls=True)}[multiplied].operands
        return grouped_quantized(rows, weight, sizes, key, operands, taken=window)

    x, weight = matrices(18, (TOKENS, 64), (1, GROUPS, 32, 64), dtype=jnp.float32)
    with pytest.raises(ValueError, match=naming(f"`x` codes {given}")):
        jax.eval_shape(product, x, weight, jax.ShapeDtypeStruct((2,), jnp.uint32))


def test_only_rows_with_a_place_count_for_the_scale_of_a_gradient():
    """Some transports bring rows that are another rank's: they change no bit."""
    window, sizes = window_and_sizes(6, 0.3)
    x, g, weight = (a.astype(jnp.float32) for a in matrices(7, (TOKENS, 16), (TOKENS, 32), (1, GROUPS, 32, 16)))
    absent = ~np.asarray(window.chosen)
    assert 0 < absent.sum() < TOKENS

    @jax.jit
    def gradients(g):
        return jax.vjp(lambda x, w: grouped_fp8(x, w, sizes, FP8_E4M3, taken=window, summed=window), x, weight)[1](g)

    for a, b in zip(gradients(g), gradients(np.where(absent[:, None], 1e6 * g, g)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_share_s_gradient_is_a_sum_in_float32():
    rows, hidden = 64, 512
    gate, up, g = matrices(8, (rows, hidden), (rows, hidden), (rows, hidden), dtype=jnp.bfloat16)
    (shares,) = matrices(9, (rows,))
    shares = jnp.asarray(np.abs(shares), jnp.float32)

    @jax.jit
    @jax.grad
    def found(shares):
        return jnp.vdot(weighted_glu(gate, up, shares, jax.nn.silu).astype(jnp.float32), g)

    wide = [np.asarray(a, np.float64) for a in (gate, up, g)]
    wanted = np.sum(wide[0] / (1 + np.exp(-wide[0])) * wide[1] * wide[2], axis=1)
    assert found(shares).dtype == jnp.float32
    assert np.linalg.norm(found(shares) - wanted) < 1e-6 * np.linalg.norm(wanted)


def test_a_weighted_product_is_rounded_once(x64):
    gate, up = matrices(10, (64, 32), (64, 32), dtype=jnp.bfloat16)
    shares = jnp.linspace(0.01, 1, 64, dtype=jnp.float32)
    wide = [np.asarray(a, np.float64) for a in (gate, up, shares)]
    exact = wide[0] / (1 + np.exp(-wide[0])) * wide[1] * wide[2][:, None]
    found = jax.jit(weighted_glu, static_argnums=3)(gate, up, shares, jax.nn.silu)
    error = np.abs(np.asarray(found, np.float64) - exact) / np.abs(exact)
    assert error.max() < 2**-8 * (1 + 1e-4)


@pytest.mark.full
def test_an_activation_may_have_parameters(x64):
    gate, up, shares, g = matrices(13, (16, 8), (16, 8), (16,), (16, 8))

    def found(beta):
        return jnp.vdot(g, weighted_glu(gate, up, shares, lambda x: x * jax.nn.sigmoid(beta * x)))

    def wanted(beta):
        return jnp.vdot(g, gate * jax.nn.sigmoid(beta * gate) * up * shares[:, None])

    np.testing.assert_allclose(jax.jit(jax.grad(found))(1.5), jax.grad(wanted)(1.5), rtol=1e-12)
