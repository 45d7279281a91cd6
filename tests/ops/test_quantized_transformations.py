"""Quantization under jax's transformations equals quantization of the parts."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from messages import naming
from selection import others_full, pairwise

import gtp_jax as gtp
from gtp_jax.formats import FP8_E4M3, MXFP8, NVFP4, NVFP4_1D, validate

from .bits import assert_same_bits

SHAPE = (3, 20, 40)


def stack() -> jax.Array:
    # layers of different sizes, so that each needs its own amax
    return jnp.asarray(np.random.default_rng(0).normal(size=SHAPE) * np.array([1, 10, 0.1])[:, None, None], jnp.float32)


def assert_same_arrays(a, b, what=""):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert_same_bits(x, y, what)


@pytest.mark.parametrize("format", others_full([NVFP4, MXFP8, FP8_E4M3], [NVFP4]), ids=str)
def test_vmap(format, implementation):
    x = stack()

    def round_trip(x):
        q = gtp.ops.quantize(x, format, axis="both", implementation=implementation)
        return q, gtp.ops.dequantize(q[1], jnp.float32, implementation=implementation)

    pair, back = jax.jit(jax.vmap(round_trip))(x)
    for q in pair:
        validate(q)
        assert q.shape == SHAPE
    for layer in range(3):
        expected = gtp.ops.quantize(x[layer], format, axis="both", implementation=implementation)
        assert_same_arrays(jax.tree.map(operator.itemgetter(layer), pair), expected, f"layer {layer}")
        assert_same_bits(back[layer], gtp.ops.dequantize(expected[1], jnp.float32))
    # and the whole stack at once, with an amax a layer
    assert_same_bits(gtp.ops.dequantize(pair[1], jnp.float32, implementation=implementation), back)


def test_vmap_of_stochastic_rounding_with_a_key_each(implementation):
    x, keys = stack(), jax.random.split(jax.random.key(0), 3)

    def codes(x, key):
        return gtp.ops.quantize(x, NVFP4_1D, key=key, implementation=implementation).codes

    together = jax.jit(jax.vmap(codes))(x, keys)
    for layer in range(3):
        assert_same_bits(together[layer], codes(x[layer], keys[layer]), f"layer {layer}")


@pytest.mark.full
def test_vmap_of_one_matrix_over_amaxes(implementation):
    x, amaxes = stack()[0], jnp.array([1.0, 5.0, 100.0])
    together = jax.vmap(lambda amax: gtp.ops.quantize(x, NVFP4, amax=amax, implementation=implementation).codes)(amaxes)
    for index, amax in enumerate(amaxes):
        assert_same_bits(together[index], gtp.ops.quantize(x, NVFP4, amax=amax, implementation=implementation).codes)


@pytest.mark.parametrize("format, check_vma", pairwise([NVFP4, MXFP8], [False, True], usual=1), ids=str)
def test_shard_map_sees_its_own_part(format, check_vma, implementation):
    if implementation == "native" and check_vma:
        pytest.skip("a kernel's results carry no varying axes; gtp_jax maps with check_vma=False")
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    mesh = gtp.make_mesh(dp=1, gtp=2, devices=jax.devices()[:2])
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 32)), jnp.float32)
    amax = gtp.ops.multi_amax([x])[0] if format.has_amax else None

    def codes(x):
        return gtp.ops.quantize(x, format, amax=amax, implementation=implementation).codes

    mapped = jax.jit(jax.shard_map(codes, mesh=mesh, in_specs=P("gtp"), out_specs=P("gtp"), check_vma=check_vma))
    assert_same_bits(mapped(x), codes(x))


def test_gradients_are_refused_by_name_and_not_silently_zero(implementation):
    x = stack()[0]

    def through(x):
        return gtp.ops.dequantize(gtp.ops.quantize(x, MXFP8, implementation=implementation), jnp.float32).sum()

    with pytest.raises(TypeError, match=naming("`gtp_jax.ops.quantize` differentiable", "jax.lax.stop_gradient")):
        jax.jit(jax.grad(through)).lower(x)
    with pytest.raises(TypeError, match=naming("`gtp_jax.ops.multi_amax` differentiable")):
        jax.jit(jax.grad(lambda x: gtp.ops.multi_amax([x], implementation=implementation)[0])).lower(x)
    beside = jax.jit(jax.grad(lambda x: x.sum() + through(jax.lax.stop_gradient(x))))(x)
    assert_same_bits(beside, jnp.ones_like(x))
