"""FP8 matmuls with given scales: operands are rounded by them, amaxes are maxima, and H200s multiply in FP8."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from messages import naming
from selection import others_full

import gtp_jax as gtp
from gtp_jax import native
from gtp_jax.formats import FP8_E4M3, FP8_E5M2, QuantizedArray
from gtp_jax.hook import maximum_gradient
from gtp_jax.ops import SlottedWeight, linear_fp8_delayed
from gtp_jax.train import compile_options

from ..hlo.programs import array, h200_mesh, needs_target
from .oracle import rounded

# the amaxes of input, weight and gradient that set the scales: no powers of two, and below those of the operands
AMAXES = 1.7, 0.9, 0.0031


def operands():
    random = np.random.default_rng(0)
    x, w, g = (random.normal(size=s).astype(np.float32) for s in ((3, 20, 48), (40, 48), (3, 20, 40)))
    return x, w, g * np.float32(1e-3)


def multiply(x, w, slot):
    codes = gtp.ops.quantize(jax.lax.stop_gradient(w), FP8_E4M3, amax=jnp.float32(AMAXES[1]))
    return linear_fp8_delayed(x, SlottedWeight(codes, w), jnp.array(AMAXES), slot, FP8_E5M2)


def test_products_are_those_of_operands_rounded_by_the_given_scales():
    x, w, g = operands()
    assert all(np.abs(a).max() > amax for a, amax in zip((x, w, g), AMAXES, strict=True))  # some values saturate

    @jax.jit
    def run(x, w, g):
        y, back = jax.vjp(multiply, x, w, jnp.zeros(2))
        return y, *back(g)

    y, to_x, to_w, seen = run(x, w, g)
    x8, g8 = rounded(x.reshape(60, 48), FP8_E4M3, AMAXES[0]), rounded(g.reshape(60, 40), FP8_E5M2, AMAXES[2])
    w8 = rounded(w, FP8_E4M3, AMAXES[1])
    for found, wanted in ((y, x8 @ w8.T), (to_x, g8 @ w8), (to_w, g8.T @ x8)):
        found = np.asarray(found).reshape(wanted.shape)
        assert np.linalg.norm(found - wanted) <= 1e-6 * np.linalg.norm(wanted)
    np.testing.assert_array_equal(np.asarray(seen), [np.abs(x).max(), np.abs(g).max()])


@pytest.mark.full
def test_in_bfloat16_a_product_is_rounded_once():
    x, w, _ = operands()
    x, w = jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16)
    wanted = rounded(np.asarray(x).reshape(60, 48), FP8_E4M3, AMAXES[0]) @ rounded(np.asarray(w), FP8_E4M3, AMAXES[1]).T
    found = np.asarray(multiply(x, w, jnp.zeros(2)), np.float64).reshape(wanted.shape)
    assert np.all(np.abs(found - wanted) <= 2.0**-8 * np.abs(wanted) + 1e-6)  # half a unit of bfloat16


@pytest.mark.parametrize("way", others_full(["calls", "loop", "checkpoint", "vmap", "cond"], ["calls", "loop", "vmap"]))
def test_the_amaxes_of_several_calls_are_their_maxima(way):
    x, w = operands()[0], jnp.asarray(operands()[1])
    parts = jnp.asarray(x * np.float32([1.0, -5.0, 2.0])[:, None, None])
    weights = jnp.array([3.0, 1.0, -2.0])  # the largest gradient is not that of the largest input

    def loss(slot):
        slot = maximum_gradient(slot)
        one = lambda x: multiply(x, w, slot)  # noqa: E731
        if way == "calls":
            y = jnp.stack([one(part) for part in parts])
        elif way == "loop":
            y = jax.lax.scan(lambda _, part: (None, one(part)), None, parts)[1]
        elif way == "checkpoint":
            y = jax.checkpoint(lambda parts: jnp.stack([one(part) for part in parts]))(parts)
        elif way == "vmap":
            y = jax.vmap(one)(parts)
        else:
            y = jnp.stack([jax.lax.cond(part[0, 0] != 9, one, lambda x: x[:, :40], part) for part in parts])
        return jnp.sum(y * weights[:, None, None])

    np.testing.assert_array_equal(np.asarray(jax.jit(jax.grad(loss))(jnp.zeros(2))), [np.abs(parts).max(), 3])


def test_a_second_derivative_is_refused():
    x, w, _ = (jnp.asarray(a) for a in operands())
    first = jax.grad(lambda x: jnp.sum(multiply(x, w, jnp.zeros(2)) ** 2))
    with pytest.raises(TypeError, match=naming("differentiated `linear_fp8_delayed`")):
        jax.jit(jax.grad(lambda x: jnp.sum(first(x) ** 2))).lower(x)


@pytest.mark.full
@needs_target
@pytest.mark.skipif(not native.has("gtp_quantize", "CUDA"), reason=native.describe())
def test_on_h200_each_product_is_one_fp8_matmul_with_float32_scales_and_amaxes_are_of_backward_alone():
    def step(x, codes, amaxes, g):
        weight = QuantizedArray(codes, None, amaxes[1], FP8_E4M3, codes.shape)
        slots = jnp.zeros(codes.shape, x.dtype), jnp.zeros(2)

        def product(x, slot, seen):
            return linear_fp8_delayed(x, SlottedWeight(weight, slot), amaxes, seen, FP8_E5M2)

        y, back = jax.vjp(product, x, *slots)
        return y, *back(g)

    mesh = h200_mesh(2)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(),) * 4, out_specs=P(), check_vma=False)
    x, g = (array(mesh, shape, P()) for shape in ((2048, 1024), (2048, 4096)))
    shapes = [x, array(mesh, (4096, 1024), P(), jnp.uint8), array(mesh, (3,), P(), jnp.float32), g]
    with jax.set_mesh(mesh):
        options = {**gtp.hlo.COMPILE_OPTIONS, **compile_options("gpu", fp8=True)}
        text = jax.jit(mapped, compiler_options=options).lower(*shapes).compile().as_text()
    matmuls = [line for line in text.splitlines() if 'custom_call_target="__cublas$lt$matmul$f8"' in line]
    assert len(matmuls) == 3
    for line in matmuls:  # codes and both scales go in, and the output comes out in its own dtype
        result, operands = re.search(r"= \((\w+)\[.*? custom-call\(([^)]*)\)", line).groups()
        assert result == "bf16" and len(operands.split(", ")) == 4, line
        for scale in operands.split(", ")[2:]:
            assert re.search(rf"{re.escape(scale)} = f32\[\]", text) and not re.search(r"bf16\[\]\S* convert", text)
    assert not re.search(r"= f32\[(2048|4096),\d+\]", text)  # no sums are stored
    assert text.count('custom_call_target="gtp_quantize"') == 3  # the input each way, the gradient both ways at once
    assert text.count('custom_call_target="gtp_multi_amax"') == 2  # of the input and of the gradient, in backward
    transposes = re.findall(r"= (\w+)\[[\d,]*\]\S* transpose\(", text)
    assert len(transposes) == 1 and transposes[0] in ("u8", "f8e4m3fn") and "gemm_fusion" not in text, transposes
