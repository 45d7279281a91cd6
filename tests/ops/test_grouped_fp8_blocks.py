"""Experts in FP8 with blocks of 128: products of each expert against float64 sums of the values of codes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from messages import naming
from selection import others_full

from gtp_jax import native
from gtp_jax.formats import FP8_BLOCKS, FP8_BLOCKS_1D, QuantizedArray
from gtp_jax.ops import Order, SlottedWeight, Window, grouped_quantized

from ..hlo.programs import array, h200_mesh, needs_target
from .experts import KEY, OPERANDS, ROW, TILE, groups_of
from .oracle import quantize_blocked, rounded_blocked

FEATURES = 192
SIZES = [1, 127, 0, 128, 129]
# rows of the kernels that share the weight, and the number of shards
ORDERS = {
    "one kernel": ((200,), 1),
    "kernels of whole tiles": ((128, 256), 1),
    "kernels cut": ((72, 200), 1),
    "shards of whole tiles": ((256, 512), 2),
    "shards cut": ((192, 64), 4),
}


def numbers(*shape, spread=2.0):
    rng = np.random.default_rng(shape)
    return (rng.normal(size=shape) * np.exp(spread * rng.normal(size=shape))).astype(np.float32)


def fused(kernels, shards):
    """The weight as it is gathered, `(shards, experts, part, features)`, of kernels `(experts, rows, features)`."""
    parts = [np.stack(np.split(kernel, shards, axis=1)) for kernel in kernels]
    return np.concatenate(parts, axis=2)


def by_kernel(y, rows, shards):
    """Features of all kernels in order of shards, as one array of each kernel's."""
    parts = y.reshape(len(y), shards, -1)
    ends = np.cumsum([size // shards for size in rows])[:-1]
    return [one.reshape(len(y), -1) for one in np.split(parts, ends, axis=2)]


def layer(rows, shards, dtype=np.float32, sizes=SIZES, behind=5):
    """Input, the values of each kernel's tiles, and the gradient; some rows belong to no expert."""
    tokens = sum(sizes) + behind
    kernels = [numbers(len(sizes), size, FEATURES) for size in rows]
    kernels = [np.stack([rounded_blocked(one, TILE) for one in kernel]).astype(np.float32) for kernel in kernels]
    x, g = numbers(tokens, FEATURES), numbers(tokens, sum(rows))
    # a kernel's gradient would be lost in a block with that of the one before it, and counts as much in the sum
    factors = [2.0 ** (-20 * at) for at in range(len(rows))]
    kernels = [kernel / np.float32(factor) for kernel, factor in zip(kernels, factors, strict=True)]
    g *= np.tile(np.repeat(factors, [size // shards for size in rows]), shards).astype(np.float32)
    return jnp.asarray(x, dtype), kernels, jnp.asarray(g, dtype)


def in_tiles(kernels, shards):
    """The codes of kernels as they are gathered: of one kernel in order of shards, otherwise kernel by kernel."""
    codes, scales = [], []
    for kernel in kernels:
        each = [quantize_blocked(one, TILE) for one in kernel]
        codes.append(np.stack([one for one, _ in each]))
        scales.append(np.stack([one for _, one in each]))
    parts = jnp.asarray(fused(codes, shards) if len(kernels) == 1 else np.concatenate(codes, axis=1)[None])
    return QuantizedArray(parts, jnp.asarray(np.concatenate(scales, axis=1)), None, FP8_BLOCKS, parts.shape[2:])


def products(x, weight, g, sizes, order, taken=None):
    shards, experts, part, features = weight.shape
    if order is not None:
        shards, part = order.ranks, part // order.ranks
    slot = jnp.zeros((shards, experts, part, features), jnp.float32)

    def call(x, slot):
        values = weight if isinstance(weight, QuantizedArray) else jnp.asarray(weight, x.dtype)
        weights = SlottedWeight(values, slot)
        return grouped_quantized(x, weights, jnp.asarray(sizes, jnp.int32), KEY, OPERANDS, taken=taken, order=order)

    y, back = jax.vjp(call, x, slot)
    return y, *back(g)


def assert_near(found, wanted, tolerance=2e-6):
    error = np.linalg.norm(np.asarray(found, np.float64) - wanted)
    assert error <= tolerance * np.linalg.norm(wanted), error / np.linalg.norm(wanted)


def order_of(rows, shards):
    return Order(rows, shards) if len(rows) > 1 else None


def along_tokens(x):
    return rounded_blocked(np.asarray(x, np.float32).T, ROW).T


@pytest.mark.parametrize("name", others_full(ORDERS, ["shards cut"]))
def test_each_expert_s_products_are_sums_of_its_rounded_operands(name):
    """Each begins a block along tokens, be it empty or a token away from a whole block. Blocks along features out begin
    at each kernel, wherever shards lay its rows."""
    rows, shards = ORDERS[name]
    x, kernels, g = layer(rows, shards)
    weight, order = in_tiles(kernels, shards), order_of(rows, shards)
    y, to_x, to_weight = jax.jit(lambda x, g: products(x, weight, g, SIZES, order))(x, g)
    assert to_weight.dtype == jnp.float32
    outputs, gradients = by_kernel(np.asarray(y), rows, shards), by_kernel(np.asarray(g), rows, shards)
    ends = np.cumsum([size // shards for size in rows])[:-1]
    to_kernels = [np.concatenate(list(part), axis=1) for part in np.split(np.asarray(to_weight), ends, axis=2)]
    forward = rounded_blocked(np.asarray(x), ROW)
    backward = [rounded_blocked(one, ROW) for one in gradients]
    for group, mine in enumerate(groups_of(SIZES)):
        assert_near(np.asarray(to_x)[mine], sum(b[mine] @ w[group] for b, w in zip(backward, kernels, strict=True)))
        for kernel, output, gradient, to_kernel in zip(kernels, outputs, gradients, to_kernels, strict=True):
            assert_near(output[mine], forward[mine] @ kernel[group].astype(np.float64).T)
            wanted = along_tokens(gradient[mine]).T @ along_tokens(np.asarray(x)[mine]) if SIZES[group] else 0.0
            assert_near(to_kernel[group], wanted * np.ones(to_kernel[group].shape))
    behind = sum(SIZES)
    assert not np.asarray(y)[behind:].any() and not np.asarray(to_x)[behind:].any()


def test_tokens_with_several_places_are_rounded_once_and_wgrad_is_made_from_their_codes():
    tokens, experts, choices = 128, 3, 2
    rng = np.random.default_rng(0)
    chosen = np.stack([rng.permutation(experts)[:choices] for _ in range(tokens)])
    pairs = np.argsort(chosen.ravel(), kind="stable").astype(np.int32)
    places = np.argsort(pairs).astype(np.int32).reshape(tokens, choices)
    sizes = np.bincount(chosen.ravel(), minlength=experts).tolist()
    _, (kernel,), g = layer((256,), 1, sizes=sizes, behind=0)
    x = numbers(tokens, FEATURES, spread=0.0) * np.exp(3 * rng.normal(size=FEATURES)).astype(np.float32)
    taken = Window(jnp.asarray(pairs), jnp.asarray(places), jnp.int32(pairs.size))
    run = jax.jit(lambda x, g: products(x, fused([kernel], 1), g, sizes, None, taken))
    y, to_x, to_weight = run(jnp.asarray(x), g)

    rows = pairs // choices
    once = rounded_blocked(x, ROW)[rows]
    backward, summed = rounded_blocked(np.asarray(g), ROW), np.zeros(x.shape)
    for group, mine in enumerate(groups_of(sizes)):
        assert_near(np.asarray(y)[mine], once[mine] @ kernel[group].astype(np.float64).T)
        np.add.at(summed, rows[mine], backward[mine] @ kernel[group])
        gradient = along_tokens(np.asarray(g)[mine]).T
        wanted, of_rows = (gradient @ along_tokens(one) for one in (once[mine], x[rows[mine]]))
        apart, found = (np.linalg.norm(one - wanted, axis=0) for one in (of_rows, np.asarray(to_weight[0, group])))
        size = np.linalg.norm(wanted, axis=0)  # of each feature in, of which small ones keep few bits
        assert np.all(found <= 1e-5 * size) and np.any(apart > 0.01 * size)
    assert_near(to_x, summed)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sums_over_16384_elements_of_one_sign_keep_float32(dtype):
    """A sum in bfloat16 stops growing at 256 times an addend. The gradient leaves in float32."""
    tokens, width = 16384, 128
    x, g = (np.abs(numbers(tokens, width)) + 1 for _ in range(2))
    x, g = (jnp.asarray(one, dtype) for one in (x, g[:, ::-1]))
    weight = np.zeros((1, 1, width, width), np.float32)
    run = jax.jit(products, static_argnums=4)
    _, _, found = run(x, weight, g, np.array([tokens]), None)
    wanted = along_tokens(np.asarray(g, np.float32)).T @ along_tokens(np.asarray(x, np.float32))
    np.testing.assert_allclose(np.asarray(found)[0, 0], wanted, rtol=1e-5)

    deep, out = np.abs(numbers(3, 16384)) + 1, np.abs(numbers(128, 16384)) + 1
    kernel = rounded_blocked(out, TILE).astype(np.float32)
    y, _, _ = run(jnp.asarray(deep, dtype), kernel[None, None], np.zeros((3, 128), dtype), np.array([3]), None)
    wanted = rounded_blocked(np.asarray(jnp.asarray(deep, dtype), np.float32), ROW) @ kernel.astype(np.float64).T
    np.testing.assert_allclose(np.asarray(y, np.float32), wanted, rtol=2**-8 if dtype == "bfloat16" else 1e-5)


@pytest.mark.full
def test_codes_multiply_as_their_values_do_where_shards_cut_tiles():
    x, (kernel,), g = layer((256,), 4)
    found = products(x, in_tiles([kernel], 4), g, SIZES, None)
    for got, wanted in zip(found, products(x, fused([kernel], 4), g, SIZES, None), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.bad_input
def test_codes_that_no_product_multiplies_are_refused():
    x, (kernel,), g = layer((256,), 1)
    codes = in_tiles([kernel], 1)
    run = lambda weight, order=None: products(x, weight, g, SIZES, order)  # noqa: E731
    with pytest.raises(ValueError, match=naming("codes FP8_BLOCKS_1D FP8_BLOCKS")):
        run(QuantizedArray(codes.codes, codes.scales, None, FP8_BLOCKS_1D, codes.matrix))
    with pytest.raises(ValueError, match=naming("`weight` (1, 5, 256, 192) (1, 5, 2, 2) (5, 2, 2)")):
        run(QuantizedArray(codes.codes, codes.scales[None], None, FP8_BLOCKS, codes.matrix))
    with pytest.raises(ValueError, match=naming("(5, 2, 2) (5, 3, 2)")):
        run(codes, Order((72, 184)))
    with pytest.raises(ValueError, match=naming("`order` `weight` codes")):
        run(fused([kernel], 1), Order((128, 128)))


@pytest.mark.slow
@needs_target
@pytest.mark.skipif(not native.has("gtp_grouped_blocked_product", "CUDA"), reason=native.describe())
def test_on_h200_codes_are_multiplied_and_the_weight_is_not_decoded():
    mesh, shape = h200_mesh(1), (2, 4, 384, 256)

    def run(x, codes, scales, sizes, g):
        weight = QuantizedArray(codes, scales, None, FP8_BLOCKS, shape[2:])
        call = lambda x, slot: grouped_quantized(x, SlottedWeight(weight, slot), sizes, KEY, OPERANDS)  # noqa: E731
        y, back = jax.vjp(call, x, jnp.zeros(shape))
        return y, *back(g)

    mapped = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    shapes = {(512, 256): jnp.bfloat16, shape: jnp.uint8, (4, 6, 2): jnp.float32, (4,): jnp.int32}
    given = [array(mesh, size, P(), dtype) for size, dtype in (shapes | {(512, 768): jnp.bfloat16}).items()]
    text = jax.jit(mapped).lower(*given).compile(compiler_options={"xla_gpu_mock_custom_calls": True}).as_text()
    count = lambda name: text.count(f'custom_call_target="gtp_{name}"')  # noqa: E731
    assert (count("grouped_blocked_product"), count("grouped_blocked_outer"), count("transpose")) == (2, 1, 1)
    # operands: rows of the input and of the gradient, and both along tokens
    assert count("quantize_runs") == 4 and count("grouped_product") + count("grouped_outer") == 0
    assert not [line for line in text.splitlines() if "bf16[2,4,384,256]" in line]
