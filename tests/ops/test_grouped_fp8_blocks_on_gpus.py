"""Kernels of Hopper multiply experts' codes in blocks of 128: products against float64 sums of the values of codes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gtp_jax import native
from gtp_jax.formats import FP8_BLOCKS, FP8_BLOCKS_1D, QuantizedArray
from gtp_jax.ops import Order, SlottedWeight, grouped_quantized, sum_of_places
from gtp_jax.ops._grouped._hopper import HOPPER_TILES

from .experts import KEY, OPERANDS, ROW, TILE, groups_of, window_and_sizes
from .oracle import dequantize_blocked, quantize_blocked, rounded_blocked

EMPTY_TO_TWO_TILES = [0, 1, 127, 128, 129, 0, 300, 0]
# Tensor cores align 32 products with their sum so far, and keep 14 bits. Products of codes of one size are exact. Where
# their sizes differ by up to 2^12, a sum is off by up to 1e-3 of its magnitude (an emulation of 14 bits gives 1.04e-3).
# Rounding a result to bfloat16 adds up to 2^-8.
ERROR_OF_ONE_SIZE, ERROR = 2e-4, 2e-3
ERROR_IN_BFLOAT16 = ERROR + 2**-8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not native.has("gtp_grouped_blocked_product", "CUDA"), reason=native.describe()),
]


def numbers(*shape, one_sign=False):
    """Numbers whose blocks have different scales; or of one sign and of one size, so that all count in a sum."""
    rng = np.random.default_rng(shape)
    if one_sign:
        return rng.uniform(0.5, 1, shape).astype(np.float32)
    x = rng.normal(size=shape)
    blocks = np.exp2(rng.integers(-6, 7, (*shape[:-1], -(-shape[-1] // 128))))
    return (x * np.repeat(blocks, 128, axis=-1)[..., : shape[-1]]).astype(np.float32)


def in_tiles(kernel, shards):
    """The codes of a kernel `(experts, out, in)` as they are gathered, and their values."""
    codes, scales = zip(*(quantize_blocked(one, TILE) for one in kernel), strict=True)
    values = np.stack([dequantize_blocked(*one, TILE) for one in zip(codes, scales, strict=True)])
    parts = jnp.asarray(np.stack(np.split(np.stack(codes), shards, axis=1)))
    return QuantizedArray(parts, jnp.asarray(np.stack(scales)), None, FP8_BLOCKS, parts.shape[2:]), values


def in_runs(x):
    """The codes of rows, and their values."""
    codes, scales = quantize_blocked(x, ROW)
    q = QuantizedArray(jnp.asarray(codes), jnp.asarray(scales), None, FP8_BLOCKS_1D, x.shape)
    return q, dequantize_blocked(codes, scales, ROW)


def in_columns(x):
    """The codes of columns, whose length is a multiple of 128, and their values `(columns, rows)`."""
    q, values = in_runs(np.ascontiguousarray(x.T))
    return QuantizedArray(q.codes, q.scales, None, FP8_BLOCKS_1D, x.shape, columns=True), values


def assert_sums(found, left, right, tolerance):
    """`left @ right.T`, with an error relative to the sum of magnitudes."""
    size = np.maximum(np.abs(left) @ np.abs(right).T, np.finfo(np.float32).tiny)
    error = np.max(np.abs(np.asarray(found).astype(np.float64) - left @ right.T) / size, initial=0)
    assert error < tolerance, error


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("out, features, shards", [
    (384, 256, 1),
    (768, 640, 3),
    (272, 144, 1),  # parts of tiles along all sides
    (192, 1040, 4),  # shards cut tiles
    (1152, 128, 4),
])  # fmt: skip
def test_rows_times_their_expert_s_kernel_and_its_transpose(out, features, shards, dtype):
    sizes = EMPTY_TO_TWO_TILES
    tokens = sum(sizes) + 5
    kernels, w = in_tiles(numbers(len(sizes), out, features), shards)
    dtype = jnp.dtype(dtype)
    given, tolerance = jnp.asarray(sizes, jnp.int32), ERROR if dtype == "float32" else ERROR_IN_BFLOAT16
    run = jax.jit(lambda q, w: HOPPER_TILES.product(q, w, given, dtype=dtype, transposed=True))
    turned = jax.jit(lambda q, w: HOPPER_TILES.product(q, w, given, dtype=dtype, transposed=False))
    for call, width, matrix in ((run, features, w), (turned, out, w.swapaxes(1, 2))):
        q, x = in_runs(numbers(tokens, width))
        y = call(q, kernels)
        assert y.dtype == dtype and y.shape == (tokens, matrix.shape[1])
        for group, mine in enumerate(groups_of(sizes)):
            assert_sums(y[mine], x[mine], matrix[group], tolerance)
        assert not np.asarray(y[sum(sizes) :], np.float32).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("out, features, shards", [(384, 256, 1), (272, 144, 1), (192, 1040, 4), (1152, 128, 3)])
def test_sums_over_each_expert_s_rows(out, features, shards, dtype):
    blocks = [0, 1, 3, 1, 0, 2, 0]
    tokens = 128 * (sum(blocks) + 2)  # the last belong to no expert
    sizes = jnp.asarray(blocks, jnp.int32) * 128
    (y, left), (x, right) = in_columns(numbers(tokens, out)), in_columns(numbers(tokens, features))
    found = jax.jit(lambda y, x: HOPPER_TILES.outer(y, x, sizes, shards=shards, dtype=jnp.dtype(dtype)))(y, x)
    assert found.dtype == dtype and found.shape == (shards, len(blocks), out // shards, features)
    joined = np.moveaxis(np.asarray(found), 0, 1).reshape(len(blocks), out, features)
    for group, mine in enumerate(groups_of(np.asarray(sizes))):
        assert_sums(joined[group], left[:, mine], right[:, mine], ERROR if dtype == "float32" else ERROR_IN_BFLOAT16)
        assert joined[group].astype(np.float32).any() == (blocks[group] > 0)


def test_sums_over_16384_elements_of_one_sign_are_promoted():
    """Without promotion to float32, such a sum loses a quarter."""
    deep, sizes = 16384, [3, 130]
    kernels, w = in_tiles(numbers(2, 256, deep, one_sign=True), 1)
    q, x = in_runs(numbers(sum(sizes), deep, one_sign=True))
    given, out = jnp.asarray(sizes, jnp.int32), jnp.dtype(jnp.float32)
    y = jax.jit(lambda q, w: HOPPER_TILES.product(q, w, given, dtype=out, transposed=True))(q, kernels)
    for group, mine in enumerate(groups_of(sizes)):
        assert_sums(y[mine], x[mine], w[group], ERROR_OF_ONE_SIZE)
    kernels, w = in_tiles(numbers(2, deep, 256, one_sign=True), 2)
    turned = lambda q, w: HOPPER_TILES.product(q, w, given, dtype=out, transposed=False)  # noqa: E731
    for group, mine in enumerate(groups_of(sizes)):
        assert_sums(jax.jit(turned)(q, kernels)[mine], x[mine], w[group].T, ERROR_OF_ONE_SIZE)
    (y, left), (x, right) = (in_columns(numbers(deep + 128, size, one_sign=True)) for size in (256, 128))
    sizes = jnp.asarray([deep, 0, 128], jnp.int32)
    found = jax.jit(lambda y, x: HOPPER_TILES.outer(y, x, sizes, shards=1, dtype=out))(y, x)
    assert_sums(found[0, 0], left[:, :deep], right[:, :deep], ERROR_OF_ONE_SIZE)
    assert_sums(found[0, 2], left[:, deep:], right[:, deep:], ERROR_OF_ONE_SIZE)


@jax.jit
def layer(x, kernels, slot, sizes, g):
    call = lambda x, slot: grouped_quantized(x, SlottedWeight(kernels, slot), sizes, KEY, OPERANDS)  # noqa: E731
    y, back = jax.vjp(call, x, slot)
    return y, *back(g)


def test_a_layer_multiplies_each_expert_s_rounded_operands():
    """Uneven experts, and tokens of no expert; the gradient of the weight leaves in float32."""
    sizes, (out, features, shards) = EMPTY_TO_TWO_TILES, (768, 384, 2)
    tokens = sum(sizes) + 5
    kernels, w = in_tiles(numbers(len(sizes), out, features), shards)
    x, g = (jnp.asarray(numbers(tokens, size), jnp.bfloat16) for size in (features, out))
    y, to_x, to_weight = layer(x, kernels, jnp.zeros(kernels.shape), jnp.asarray(sizes, jnp.int32), g)
    assert to_weight.dtype == jnp.float32 and y.dtype == to_x.dtype == jnp.bfloat16
    to_w = np.moveaxis(np.asarray(to_weight), 0, 1).reshape(w.shape)
    x, g = (np.asarray(a, np.float32) for a in (x, g))
    for group, mine in enumerate(groups_of(sizes)):
        assert_sums(y[mine], rounded_blocked(x[mine], ROW), w[group], ERROR_IN_BFLOAT16)
        assert_sums(to_x[mine], rounded_blocked(g[mine], ROW), w[group].T, ERROR_IN_BFLOAT16)
        along = [rounded_blocked(np.ascontiguousarray(a[mine].T), ROW) for a in (g, x)] if sizes[group] else []
        if along:
            assert_sums(to_w[group], *along, ERROR)
        else:
            assert not to_w[group].any()
    behind = sum(sizes)
    assert not np.asarray(y[behind:], np.float32).any() and not np.asarray(to_x[behind:], np.float32).any()


def test_kernels_that_shards_cut_are_multiplied_one_after_another():
    """Gate and up of which each of two shards has parts of tiles: codes lie kernel by kernel, features by shard."""
    sizes, rows, shards, features = EMPTY_TO_TWO_TILES, (192, 64), 2, 256
    experts, tokens = len(sizes), sum(sizes)
    parts = [in_tiles(numbers(experts, size, features), 1) for size in rows]
    codes, scales = (jnp.concatenate([getattr(q, name) for q, _ in parts], axis=-2) for name in ("codes", "scales"))
    kernels, order = QuantizedArray(codes, scales, None, FP8_BLOCKS, codes.shape[2:]), Order(rows, shards)
    x, g = (jnp.asarray(numbers(tokens, size), jnp.bfloat16) for size in (features, sum(rows)))
    slot, given = jnp.zeros((shards, experts, sum(rows) // shards, features)), jnp.asarray(sizes, jnp.int32)

    @jax.jit
    def run(x, kernels, g):
        call = lambda x, s: grouped_quantized(x, SlottedWeight(kernels, s), given, KEY, OPERANDS, order=order)  # noqa: E731
        y, back = jax.vjp(call, x, slot)
        return y, *back(g)

    y, to_x, to_weight = (np.asarray(a, np.float32) for a in run(x, kernels, g))
    ends = np.cumsum([size // shards for size in rows])[:-1]
    by_kernel = lambda a, axis: [  # noqa: E731
        np.concatenate(list(one), axis=axis) for one in np.split(a, ends, axis=axis + 1)
    ]
    outputs, gradients = (
        by_kernel(np.moveaxis(a.reshape(tokens, shards, -1), 1, 0), 1) for a in (y, np.asarray(g, np.float32))
    )
    rounded = rounded_blocked(np.asarray(x, np.float32), ROW)
    for group, mine in enumerate(groups_of(sizes)):
        back = np.concatenate([rounded_blocked(one[mine], ROW) for one in gradients], axis=1)
        assert_sums(to_x[mine], back, np.concatenate([w[group] for _, w in parts]).T, ERROR_IN_BFLOAT16)
        for (_, w), output, gradient, to_kernel in zip(parts, outputs, gradients, by_kernel(to_weight, 1), strict=True):
            assert_sums(output[mine], rounded[mine], w[group], ERROR_IN_BFLOAT16)
            if sizes[group]:
                sides = (gradient, np.asarray(x, np.float32))
                along = [rounded_blocked(np.ascontiguousarray(a[mine].T), ROW) for a in sides]
                assert_sums(to_kernel[group], *along, ERROR)


def test_rows_at_places_have_the_bits_of_rows_that_were_moved():
    rng = np.random.default_rng(0)
    tokens, top_k, experts, out, features = 600, 3, 8, 384, 256
    window, sizes = window_and_sizes(rng, tokens, top_k, experts)
    kernels, _ = in_tiles(numbers(experts, out, features), 1)
    x = jnp.asarray(numbers(tokens, features), jnp.bfloat16)
    slot = jnp.zeros(kernels.shape)

    def run(x, kernels, taken=None):
        return grouped_quantized(x, SlottedWeight(kernels, slot), sizes, KEY, OPERANDS, taken=taken)

    total = lambda y: sum_of_places(y, window)  # noqa: E731
    found = jax.jit(lambda x, kernels: total(run(x, kernels, window)))(x, kernels)
    wanted = jax.jit(lambda x, kernels: total(run(x[window.rows], kernels)))(x, kernels)
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))
