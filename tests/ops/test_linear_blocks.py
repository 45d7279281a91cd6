"""Matmuls in block formats multiply what the oracle says the operands are rounded to, in exact products."""

import functools

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest
from selection import others_full

import gtp_jax as gtp
from gtp_jax.chain import with_remat
from gtp_jax.formats import MXFP8, NVFP4, NVFP4_1D, Operands
from gtp_jax.ops import linear_blocks, power_of_two_amax

from .oracle import rounded

KEY = jnp.array([5, 7], jnp.uint32)
OPERANDS = {
    "MXFP8": gtp.MXFP8(matmuls=True).operands,
    "NVFP4": gtp.NVFP4(matmuls=True).operands,
    "NVFP4, rounded to nearest": gtp.NVFP4(matmuls=True, stochastic=False).operands,
    "NVFP4, not transformed": gtp.NVFP4(matmuls=True, hadamard=False).operands,
}
every_recipe = pytest.mark.parametrize("name", OPERANDS)


@pytest.fixture
def block_scales(monkeypatch):
    """Has the platform pass for one with block scales; XLA writes the products of codes and scales out elsewhere."""
    monkeypatch.setattr("gtp_jax.ops._linear._blocks.supports_block_scaled_matmul", lambda: True)


@functools.partial(jax.jit, static_argnums=1)
def travelled(w, form):
    amax = power_of_two_amax(gtp.ops.multi_amax([w]), form)[0] if form.has_amax else None
    return gtp.ops.dequantize(gtp.ops.quantize(w, form, amax=amax), w.dtype)


def operands_of_a_layer(dtype):
    random = np.random.default_rng(0)
    x, w, g = (random.normal(size=s) for s in ((3, 20, 96), (64, 96), (3, 20, 64)))
    x, g = x * np.exp(random.normal(size=x.shape)), g * 1e-3  # unequal scales
    return (jnp.asarray(a, dtype) for a in (x, w, g))


def products(x, w, g, operands):
    y, back = jax.vjp(lambda x, w: linear_blocks(x, w, KEY, operands), x, w)
    return y, *back(g)


@pytest.mark.parametrize("name", others_full(OPERANDS, ["MXFP8", "NVFP4"]))
def test_forward_and_backward_multiply_the_rounded_operands(name):
    operands = OPERANDS[name]
    x, w, g = operands_of_a_layer(jnp.float32)
    w = travelled(w, operands.weight)
    found = jax.jit(lambda *given: products(*given, operands))(x, w, g)
    rows, gradient = np.reshape(x, (60, 96)), np.reshape(g, (60, 64))
    key = [5, 7] if operands.stochastic else None
    forward = rounded(rows, operands.activation) @ np.asarray(w, np.float64).T
    np.testing.assert_array_equal(np.asarray(w, np.float64), rounded(w, operands.weight))  # once is enough
    to_x = rounded(gradient, operands.gradient, key=key) @ rounded(w, operands.weight, columns=True)
    along_tokens = dict(columns=True, transform=operands.hadamard)
    to_w = rounded(gradient, operands.gradient, key=key, **along_tokens).T @ rounded(
        rows, operands.activation, **along_tokens
    )
    for got, wanted in zip(found, (forward, to_x, to_w), strict=True):
        got = np.reshape(got, wanted.shape)
        assert np.linalg.norm(got - wanted) <= 1e-6 * np.linalg.norm(wanted)


@pytest.mark.full
@every_recipe
def test_bfloat16_holds_every_rounded_operand_so_that_products_differ_by_the_rounding_of_results_alone(name):
    operands = OPERANDS[name]
    x, w, g = operands_of_a_layer(jnp.bfloat16)
    w = travelled(w, operands.weight)
    found = products(x, w, g, operands)
    wanted = products(*(a.astype(jnp.float32) for a in (x, w, g)), operands)
    for got, exact in zip(found, wanted, strict=True):
        assert got.dtype == jnp.bfloat16
        scale = np.abs(np.asarray(exact)).max()
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(exact), rtol=2**-8, atol=1e-5 * scale)


@pytest.mark.slow
@every_recipe
def test_products_of_codes_and_scales_are_those_of_the_values(name, block_scales):
    operands = OPERANDS[name]
    random = np.random.default_rng(3)
    x, w, g = (jnp.asarray(random.normal(size=s), jnp.float32) for s in ((64, 96), (128, 96), (64, 128)))
    w = travelled(w, operands.weight)
    found, wanted = (
        (y, *back(g))
        for how in ("native", "reference")
        for y, back in [jax.vjp(lambda x, w, how=how: linear_blocks(x, w, KEY, operands, implementation=how), x, w)]
    )
    for got, exact in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize("name", others_full(OPERANDS, ["MXFP8", "NVFP4"]))
def test_for_gpus_with_block_scales_every_product_is_one_of_codes_and_scales(name, block_scales):
    def step(x, w, g):
        y, back = jax.vjp(lambda x, w: linear_blocks(x, w, KEY, OPERANDS[name], implementation="native"), x, w)
        return y, *back(g)

    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((256, 128), (384, 128), (256, 384))]
    text = jax.jit(step).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__op$block_scaled_dot") == 3 and "dot_general" not in text


@pytest.mark.full
def test_dgrad_in_mxfp8_is_that_of_codes_made_of_the_master():
    random = np.random.default_rng(1)
    w = jnp.asarray(random.normal(size=(128, 96)) * np.exp(random.normal(size=(128, 96))), jnp.float32)
    again = gtp.ops.dequantize(gtp.ops.quantize(travelled(w, MXFP8), MXFP8, axis="column"), jnp.float32)
    at_once = gtp.ops.dequantize(gtp.ops.quantize(w, MXFP8, axis="column"), jnp.float32)
    blocks = np.abs(np.asarray(w))
    largest = np.maximum(
        np.repeat(blocks.reshape(4, 32, 96).max(1), 32, 0), np.repeat(blocks.reshape(128, 3, 32).max(2), 32, 1)
    )
    normal = blocks > largest * 2.0**-14
    assert normal.mean() > 0.99
    np.testing.assert_array_equal(np.asarray(again)[normal], np.asarray(at_once)[normal])


def test_a_token_s_output_does_not_depend_on_the_others():
    x, w, _ = operands_of_a_layer(jnp.float32)
    operands = Operands(weight=NVFP4, activation=NVFP4_1D, gradient=NVFP4_1D)
    w = travelled(w, NVFP4)
    call = jax.jit(lambda x: linear_blocks(x, w, KEY, operands))
    np.testing.assert_array_equal(call(np.asarray(x)[:1]), np.asarray(call(x))[:1])


@pytest.mark.parametrize("how", others_full(["native", "reference"], ["reference"]))
def test_no_tokens_have_no_outputs_and_gradients_of_zero(how, block_scales):
    w, x = jnp.ones((64, 96)), jnp.ones((0, 96))

    @jax.jit
    def run(x, w):
        y, back = jax.vjp(lambda x, w: linear_blocks(x, w, KEY, OPERANDS["NVFP4"], implementation=how), x, w)
        return y, *back(y)

    y, to_x, to_w = run(x, w)
    assert y.shape == (0, 64) and to_x.shape == (0, 96) and not np.any(to_w)


def test_where_codes_are_multiplied_the_policy_matmuls_saves_the_product_too(block_scales, capsys):
    def product(x, w):
        return jnp.tanh(linear_blocks(x, w, KEY, gtp.MXFP8(matmuls=True).operands, implementation="native"))

    x, weight = jnp.ones((64, 96), jnp.bfloat16), jnp.ones((32, 96), jnp.bfloat16)
    jax.ad_checkpoint.print_saved_residuals(with_remat(product, "matmuls"), x, weight)
    saved = [line for line in capsys.readouterr().out.splitlines() if "argument" not in line and "constant" not in line]
    assert [line.split()[0] for line in saved] == ["bf16[64,32]"]
