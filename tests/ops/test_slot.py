"""The gradient of a weight with a slot is the one that sums of float32 give, whatever the operands' dtype."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import naming
from selection import others_full

import gtp_jax as gtp
from gtp_jax import native
from gtp_jax.formats import FP8_E4M3, FP8_E5M2
from gtp_jax.ops import (
    SlottedWeight,
    embedding_lookup,
    grouped_fp8,
    grouped_matmul,
    grouped_quantized,
    linear,
    linear_blocks,
    linear_fp8,
    power_of_two_amax,
)
from gtp_jax.train import compile_options

from ..hlo.programs import array, h200_mesh, needs_target

KEY = jnp.array([1, 2], jnp.uint32)
SIZES = jnp.array([40, 0, 24, 64], jnp.int32)
IDS = jnp.asarray(np.random.default_rng(9).integers(0, 16, 128))
MX, NV = gtp.MXFP8(matmuls=True).operands, gtp.NVFP4(matmuls=True).operands

# of `(x, weight)`; what has shapes (128, 96), (64, 96) and (128, 64), or four experts' weights
PRODUCTS = {
    "linear": linear,
    "linear_fp8": lambda x, w: linear_fp8(x, w, FP8_E5M2),
    "linear_blocks mxfp8": lambda x, w: linear_blocks(x, w, KEY, MX),
    "linear_blocks nvfp4": lambda x, w: linear_blocks(x, w, KEY, NV),
    "grouped_matmul": lambda x, w: grouped_matmul(x, w, SIZES),
    "grouped_fp8": lambda x, w: grouped_fp8(x, w, SIZES, FP8_E5M2),
    "grouped_quantized nvfp4": lambda x, w: grouped_quantized(x, w, SIZES, KEY, NV),
    "embedding_lookup": lambda x, w: embedding_lookup(w, IDS),
}


def operands(name):
    """Input, weight and gradient, of numbers that bfloat16 holds."""
    rng = np.random.default_rng(0)
    shapes = {"grouped": ((128, 96), (1, 4, 64, 96), (128, 64)), "embedding_lookup": ((1,), (16, 64), (128, 64))}
    x, w, g = shapes.get("grouped" if name.startswith("grouped") else name, ((128, 96), (64, 96), (128, 64)))
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in (x, w, g))


@pytest.mark.parametrize("shape", [(4, 32), (4, 3, 32), (4, 3, 2, 32)], ids=str)
def test_the_transposed_gradient_of_a_bfloat16_weight_is_summed_in_float32_over_any_rows(shape):
    rng = np.random.default_rng(0)
    x, g = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for _ in range(2))

    def transposed(x, g):
        weight = SlottedWeight(jnp.ones((32, 32), x.dtype), jnp.zeros((32, 32), jnp.float32))
        return jax.vjp(lambda w: linear(x, w), weight)[1](g)[0].slot.T

    rows = [np.asarray(a, np.float64).reshape(-1, 32) for a in (x, g)]
    np.testing.assert_allclose(jax.jit(transposed)(x, g), rows[0].T @ rows[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    others_full(PRODUCTS, ["grouped_matmul", "embedding_lookup"]),
)
def test_a_slot_gets_the_gradient_unrounded_and_is_never_read(name):
    product, (x, w, g) = PRODUCTS[name], operands(name)

    @functools.partial(jax.jit, static_argnums=0)
    def run(product, g, *operands):
        y, back = jax.vjp(product, *operands)
        return y, *back(g)

    wide = [jnp.asarray(np.asarray(a, np.float32)) for a in (g, x, w)]
    wanted = np.asarray(run(product, *wide)[2], np.float64)
    slot = jnp.asarray(np.full(w.shape, np.nan, np.float32))
    y, to_x, to_values, found = run(lambda x, w, slot: product(x, SlottedWeight(w, slot)), g, x, w, slot)
    assert found.dtype == jnp.float32 and not np.any(np.asarray(to_values, np.float32))
    assert np.linalg.norm(np.asarray(found) - wanted) <= 1e-6 * np.linalg.norm(wanted)
    # without a slot it is rounded; output and input's gradient are the same
    bare, bare_x, rounded = run(product, g, x, w)
    assert rounded.dtype == jnp.bfloat16
    assert 5e-4 * np.linalg.norm(wanted) <= np.linalg.norm(np.asarray(rounded, np.float64) - wanted)
    for a, b in ((y, bare), (to_x, bare_x)):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_codes_are_refused_by_a_product_that_does_not_multiply_them():
    x, w, _ = operands("linear")

    def product(x, w):
        codes = gtp.ops.quantize(w, FP8_E4M3, amax=power_of_two_amax(gtp.ops.multi_amax([w]), FP8_E4M3)[0])
        return linear(x, SlottedWeight(codes, jnp.zeros(w.shape)))

    with pytest.raises(TypeError, match=naming("codes FP8_E4M3")):
        jax.eval_shape(product, x, w)


@needs_target
@pytest.mark.skipif(not native.has("gtp_quantize", "CUDA"), reason=native.describe())
@pytest.mark.full
@pytest.mark.parametrize("name", ["linear", "linear_fp8"])
def test_on_h200_a_product_writes_the_slots_float32_itself(name):
    def step(x, w, g):
        return jax.vjp(lambda x, slot: PRODUCTS[name](x, SlottedWeight(w, slot)), x, jnp.zeros(w.shape))[1](g)

    mesh = h200_mesh(1)
    shapes = [array(mesh, shape, jax.sharding.PartitionSpec()) for shape in ((2048, 1024), (4096, 1024), (2048, 4096))]
    with jax.set_mesh(mesh):
        options = {**gtp.hlo.COMPILE_OPTIONS, **compile_options("gpu", fp8=True)}
        text = jax.jit(step, compiler_options=options).lower(*shapes).compile().as_text()
    calls = [line for line in text.splitlines() if "custom-call(" in line and "__cublas$" in line]
    assert len(calls) == 2 and all(("$f8" in line) == (name == "linear_fp8") for line in calls)
    assert [line.split(" = ")[1].lstrip("(").split("[")[0] for line in calls].count("f32") == 1
