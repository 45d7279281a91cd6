"""Experts multiply FP8 codes as the oracle rounds them, group by group; codes are the same bits whichever way made."""

import functools

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
from gtp_jax.mesh import platform
from gtp_jax.ops import SlottedWeight, grouped_fp8, multi_amax, power_of_two_amax, sum_of_places
from gtp_jax.ops._quantize import amax_fused, quantize_fused

from ..hlo.programs import array, h200_mesh, needs_target
from .experts import window_and_sizes
from .test_grouped_quantized import SIZES, expected, operands_of_a_layer

FORMATS = {"e5m2": FP8_E5M2, "e4m3": FP8_E4M3}


def products(x, weight, g, sizes, gradients, implementation="reference"):
    sizes = jnp.asarray(sizes, jnp.int32)
    y, back = jax.vjp(lambda x, w: grouped_fp8(x, w, sizes, gradients, implementation=implementation), x, weight)
    return y, *back(g)


def errors(found, wanted):
    y, to_x, to_weight = found
    to_w = np.reshape(np.swapaxes(to_weight, 0, 1), wanted[2].shape)
    return [
        np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)
        for a, b in zip((y, to_x, to_w), wanted, strict=True)
    ]


@pytest.mark.parametrize("name, experts", [("e5m2", 4), pytest.param("e4m3", 64, marks=pytest.mark.slow)])
def test_products_are_of_each_group_s_rounded_operands(name, experts):
    operands, sizes = gtp.FP8(matmuls=True, gradient=name).operands, SIZES[experts]
    x, weight, g, w = operands_of_a_layer(sizes, FP8_E4M3, jnp.float32, shards=2)
    found = jax.jit(lambda *given: products(*given, sizes, FORMATS[name]))(x, weight, g)
    assert max(errors(found, expected(x, w, g, sizes, operands))) <= 1e-6
    # codes with a scale a group multiply as their values do, and leave their gradient in the slot
    largest = np.broadcast_to(np.abs(w).max((1, 2)).astype(np.float32), weight.shape[:2])
    codes = jax.jit(lambda w, a: gtp.ops.quantize(w, FP8_E4M3, amax=power_of_two_amax(a, FP8_E4M3)))(weight, largest)
    sizes = jnp.asarray(sizes, jnp.int32)

    @jax.jit
    def of_codes(x, g, codes):
        call = lambda x, s: grouped_fp8(x, SlottedWeight(codes, s), sizes, FORMATS[name])  # noqa: E731
        y, back = jax.vjp(call, x, jnp.zeros(weight.shape))
        return y, *back(g)

    for got, wanted in zip(of_codes(x, g, codes), found, strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("form", others_full(FORMATS.values(), [FP8_E4M3]), ids=str)
def test_codes_made_in_a_fusion_are_those_of_the_kernels(form):
    rng = np.random.default_rng(0)
    for dtype, spread in ((jnp.bfloat16, 0), (jnp.bfloat16, 8), (jnp.float32, 3)):
        x = rng.normal(size=(40, 48)) * np.exp(spread * rng.normal(size=(40, 48)))
        x[3, 5], x[7, 9], x[1, 1] = np.nan, -np.inf, -0.0
        x = jnp.asarray(x, dtype)
        amax = multi_amax([x])[0]
        assert jax.jit(amax_fused)(x) == amax
        # on GPUs XLA divides by other numbers than powers of two to the last bit but one
        exact = (amax,) if platform() == "cpu" else ()
        for chosen in (*exact, power_of_two_amax(amax, form), jnp.float32(0)):
            wanted = gtp.ops.quantize(x, form, amax=chosen)
            fused = jax.jit(quantize_fused, static_argnums=1)(x, form, chosen)
            np.testing.assert_array_equal(fused.codes, wanted.codes)


@pytest.mark.bad_input
def test_a_weight_of_another_shape_is_refused():
    x, weight = np.zeros((4, 16)), np.zeros((1, 3, 8, 16))
    with pytest.raises(ValueError, match=naming("`group_sizes` (2,) 3 groups")):
        jax.eval_shape(lambda *given: grouped_fp8(*given, FP8_E5M2), x, weight, np.zeros(2, np.int32))


@pytest.mark.slow
@needs_target
@pytest.mark.skipif(not native.has("gtp_grouped_product", "CUDA"), reason=native.describe())
def test_on_h200_codes_are_multiplied_as_they_travel():
    mesh = h200_mesh(1)

    def run(x, codes, amax, sizes, g):
        weight = QuantizedArray(codes, None, amax, FP8_E4M3, (384, 256))
        slot = jnp.zeros((2, 4, 384, 256))
        call = lambda x, slot: grouped_fp8(x, SlottedWeight(weight, slot), sizes, FP8_E5M2)  # noqa: E731
        y, back = jax.vjp(call, x, slot)
        return y, *back(g)

    mapped = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    shapes = {(512, 256): jnp.bfloat16, (2, 4, 384, 256): jnp.uint8, (2, 4): jnp.float32, (4,): jnp.int32}
    given = [array(mesh, shape, P(), dtype) for shape, dtype in (shapes | {(512, 768): jnp.bfloat16}).items()]
    text = jax.jit(mapped).lower(*given).compile(compiler_options={"xla_gpu_mock_custom_calls": True}).as_text()
    calls = {name: text.count(f'custom_call_target="{name}"') for name in ("gtp_grouped_product", "gtp_grouped_outer")}
    assert calls == {"gtp_grouped_product": 2, "gtp_grouped_outer": 1}
    assert text.count('custom_call_target="gtp_transpose"') == 3  # weight, input and gradient
    assert "gtp_quantize" not in text and "gtp_dequantize" not in text and "__gpu$xla.gpu.triton" not in text


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("sizes, out, features, shards", [
    ([130, 0, 1, 300, 77], 384, 256, 1),
    ([17, 512, 128, 3], 768, 2048, 3),
    ([900], 272, 144, 1),  # parts of tiles along all sides
    ([100, 50], 96, 64, 2),  # shards that are no whole tiles
    ([300, 50], 1152, 128, 4),
    ([100, 50], 40, 64, 2),  # no kernel takes rows of 40 bytes: values are multiplied
])  # fmt: skip
def test_gpus_multiply_each_group_s_rounded_operands(name, sizes, out, features, shards):
    rng = np.random.default_rng(0)
    x, g = (jnp.asarray(rng.normal(size=(sum(sizes) + 5, n)), jnp.bfloat16) for n in (features, out))
    scale = 4.0 ** np.arange(len(sizes))[:, None, None, None]
    weight = rng.normal(size=(len(sizes), shards, out // shards, features)) * scale
    weight = jnp.asarray(np.swapaxes(weight, 0, 1), jnp.bfloat16)
    run = functools.partial(products, sizes=sizes, gradients=FORMATS[name])
    found = jax.jit(functools.partial(run, implementation="native"))(x, weight, g)
    with jax.default_device(jax.devices("cpu")[0]):
        wanted = run(*(jnp.asarray(np.asarray(a, np.float32)) for a in (x, weight, g)))
    for got, exact in zip(found, wanted, strict=True):
        exact = np.asarray(exact, np.float64)
        # bfloat16 results, and sums of tensor cores
        assert np.linalg.norm(np.asarray(got, np.float64) - exact) <= 1e-2 * np.linalg.norm(exact)
    behind = sum(sizes)
    assert not np.asarray(found[0][behind:]).any() and not np.asarray(found[1][behind:]).any()
    assert [bool(np.asarray(found[2][:, i]).any()) for i in range(len(sizes))] == [size > 0 for size in sizes]


@pytest.mark.gpu
def test_tiles_are_transposed_bit_for_bit():
    rows = np.random.default_rng(0).integers(0, 256, (1000, 272)).astype(np.uint8)
    starts, stops = np.array([0, 128, 200, 5, 900, 990], np.int32), np.array([128, 130, 200, 100, 1000, 1000], np.int32)
    found = jax.jit(functools.partial(native.transpose, matrices=2))(rows, starts, stops)
    parts = [np.pad(rows[i:j], ((0, 128 - (j - i)), (0, 0))).T for i, j in zip(starts, stops, strict=True)]
    wanted = np.stack([np.concatenate(parts[:3], axis=1), np.concatenate(parts[3:], axis=1)])
    np.testing.assert_array_equal(found, wanted)
    places = np.random.default_rng(1).integers(-1, 1001, 1000).astype(np.int32)  # 1000 and -1 are no row's
    found = jax.jit(functools.partial(native.transpose, matrices=2))(rows, starts, stops, index=places)
    there = np.where(((places >= 0) & (places < 1000))[:, None], rows[np.clip(places, 0, 999)], 0)
    parts = [np.pad(there[i:j], ((0, 128 - (j - i)), (0, 0))).T for i, j in zip(starts, stops, strict=True)]
    wanted = np.stack([np.concatenate(parts[:3], axis=1), np.concatenate(parts[3:], axis=1)])
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_on_gpus_rows_at_places_have_the_bits_of_rows_that_were_moved(name):
    rng = np.random.default_rng(0)
    tokens, top_k, groups, out, features = 600, 3, 8, 384, 256
    window, sizes = window_and_sizes(rng, tokens, top_k, groups)
    x, g = (jnp.asarray(rng.normal(size=(tokens, n)), jnp.bfloat16) for n in (features, out))
    weight = jnp.asarray(rng.normal(size=(1, groups, out, features)), jnp.bfloat16)

    @jax.jit
    def at_places(x, weight, g):
        run = lambda x, w: grouped_fp8(x, w, sizes, FORMATS[name], taken=window, summed=window)  # noqa: E731
        y, back = jax.vjp(run, x, weight)
        return y, *back(g)

    @jax.jit
    def moved(x, weight, g):
        run = lambda x, w: grouped_fp8(x, w, sizes, FORMATS[name])  # noqa: E731
        y, back = jax.vjp(run, x[window.rows], weight)
        # of the same scale, that of rows with a place
        to_x, to_weight = back(jnp.where(window.real[:, None], g[window.rows], 0))
        total = lambda a: sum_of_places(jnp.where(window.real[:, None], a, 0), window)  # noqa: E731
        return total(y), total(to_x), to_weight

    for got, wanted in zip(at_places(x, weight, g), moved(x, weight, g), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(wanted, np.float32))
