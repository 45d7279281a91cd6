"""Experts multiply what the oracle says their operands are rounded to, expert by expert, whatever the groups' sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from selection import others_full, pairwise

import gtp_jax as gtp
from gtp_jax.formats import Operands
from gtp_jax.ops import grouped_quantized

from ..hlo.programs import array, grouped_kernels, h200_mesh, needs_target
from . import oracle
from .experts import groups_of
from .oracle import rounded

KEY = jnp.array([3, 11], jnp.uint32)
OPERANDS: dict[str, Operands] = {
    "MXFP8": gtp.MXFP8(matmuls=True).operands,
    "NVFP4": gtp.NVFP4(matmuls=True).operands,
    "NVFP4, rounded to nearest": gtp.NVFP4(matmuls=True, stochastic=False).operands,
    "NVFP4, not transformed": gtp.NVFP4(matmuls=True, hadamard=False).operands,
}
FEATURES, OUT = 96, 64
SIZES = {
    2: [21, 27],
    4: [19, 0, 37, 8],
    64: [3, 0, 1, 40, *[0, 5] * 30],
}


def operands_of_a_layer(sizes, form, dtype, shards=1, behind=3):
    """Input, weight as it travelled, gradient; some rows belong to none."""
    rng = np.random.default_rng(len(sizes))
    rows = sum(sizes) + behind
    x = rng.normal(size=(rows, FEATURES)) * np.exp(rng.normal(size=(rows, 1)))
    g = rng.normal(size=(rows, OUT)) * 1e-3
    w = rng.normal(size=(len(sizes), OUT, FEATURES)) * np.exp(rng.normal(size=(len(sizes), 1, 1)))
    w = np.stack([rounded(one.astype(np.float32), form) for one in w])
    weight = np.swapaxes(w.reshape(len(sizes), shards, OUT // shards, FEATURES), 0, 1)
    return jnp.asarray(x, dtype), jnp.asarray(weight, dtype), jnp.asarray(g, dtype), w


def products(x, weight, g, sizes, operands, implementation="reference"):
    sizes = jnp.asarray(sizes, jnp.int32)
    call = lambda x, w: grouped_quantized(x, w, sizes, KEY, operands, implementation=implementation)  # noqa: E731
    y, back = jax.vjp(call, x, weight)
    return y, *back(g)


def moved_apart(x, sizes, run):
    """Every group at a multiple of `run`; as many rows as the library has, for the places of the random bits."""
    groups = []
    for mine in groups_of(sizes):
        part = np.asarray(x[mine], np.float32)
        groups.append(np.pad(part, ((0, -len(part) % run), (0, 0))))
    found = np.concatenate(groups)
    return np.pad(found, ((0, (len(x) // run + len(sizes) + 1) * run - len(found)), (0, 0)))


def expected(x, w, g, sizes, operands):
    """Forward, dgrad and wgrad, each group by itself, in float64."""
    x, g = np.asarray(x, np.float32), np.asarray(g, np.float32)
    key = [3, 11] if operands.stochastic else None
    forward = rounded(x, operands.activation)
    backward = rounded(g, operands.gradient, key=key)
    y, to_x, to_w = np.zeros(g.shape), np.zeros(x.shape), np.zeros(w.shape)
    form = operands.weight
    transposed = [rounded(one.astype(np.float32), form, columns=True) for one in w]
    for group, mine in enumerate(groups_of(sizes)):
        y[mine] = forward[mine] @ w[group].T
        to_x[mine] = backward[mine] @ transposed[group]
    if form.block is None:
        for group, mine in enumerate(groups_of(sizes)):
            to_w[group] = backward[mine].T @ forward[mine]
        return y, to_x, to_w
    run = operands.gradient.block[1]
    sides = []
    for a, form, bits in ((x, operands.activation, None), (g, operands.gradient, key)):
        apart = moved_apart(a, sizes, run)
        # rows that belong to no group count too, but for those that are transformed
        amax = None if operands.hadamard else oracle.power_of_two_amax(oracle.amax(a), form)
        sides.append(rounded(apart, form, amax, columns=True, transform=operands.hadamard, key=bits))
    start = 0
    for group, size in enumerate(sizes):
        whole = slice(start, start := start + -(-size // run) * run)
        to_w[group] = sides[1][whole].T @ sides[0][whole]
    return y, to_x, to_w


@pytest.mark.parametrize("name, experts", pairwise(OPERANDS, [4, 2, 64], usual=2))
def test_forward_and_backward_multiply_each_group_s_rounded_operands(name, experts):
    operands, sizes = OPERANDS[name], SIZES[experts]
    x, weight, g, w = operands_of_a_layer(sizes, operands.weight, jnp.float32, shards=2)
    y, to_x, to_weight = jax.jit(lambda x, w, g: products(x, w, g, sizes, operands))(x, weight, g)
    to_w = np.reshape(np.swapaxes(to_weight, 0, 1), w.shape)
    for got, wanted in zip((y, to_x, to_w), expected(x, w, g, sizes, operands), strict=True):
        assert np.linalg.norm(got - wanted) <= 1e-6 * np.linalg.norm(wanted)


@pytest.mark.parametrize("name", others_full(["MXFP8", "NVFP4"], ["NVFP4"]))
def test_no_rows_have_an_empty_product_and_no_gradient(name):
    x, weight, g, _ = operands_of_a_layer([0, 0, 0], OPERANDS[name].weight, jnp.float32, shards=2, behind=0)
    y, to_x, to_weight = jax.jit(lambda *given: products(*given, [0, 0, 0], OPERANDS[name]))(x, weight, g)
    assert y.shape == (0, OUT) and to_x.shape == x.shape
    np.testing.assert_array_equal(to_weight, np.zeros(weight.shape))


@pytest.mark.slow
@needs_target
@pytest.mark.parametrize("name", ["MXFP8", "NVFP4"])
def test_on_h200_a_pass_is_one_grouped_kernel_a_product(name):
    mesh, operands = h200_mesh(1), OPERANDS[name]

    def run(x, weight, sizes, g):
        call = lambda x, w: grouped_quantized(x, w, sizes, KEY, operands, implementation="native")  # noqa: E731
        y, back = jax.vjp(call, x, weight)
        return y, *back(g)

    mapped = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    shapes, bf16 = ((512, 256), (1, 4, 384, 256), (4,), (512, 384)), jnp.bfloat16
    dtypes = (bf16, bf16, jnp.int32, bf16)
    given = [array(mesh, shape, P(), dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    text = jax.jit(mapped).lower(*given).compile(compiler_options={"xla_gpu_mock_custom_calls": True}).as_text()
    assert grouped_kernels(text) == 3
    assert " dot(" not in text and "__cublas" not in text


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERANDS)
def test_gpus_multiply_each_group_s_rounded_operands(name):
    operands, sizes = OPERANDS[name], SIZES[4]
    x, weight, g, w = operands_of_a_layer(sizes, operands.weight, jnp.bfloat16, shards=2)
    y, to_x, to_weight = jax.jit(lambda x, w, g: products(x, w, g, sizes, operands, "native"))(x, weight, g)
    to_w = np.reshape(np.swapaxes(to_weight, 0, 1), w.shape)
    for got, wanted in zip((y, to_x, to_w), expected(x, w, g, sizes, operands), strict=True):
        assert np.linalg.norm(np.asarray(got, np.float64) - wanted) <= 5e-3 * np.linalg.norm(wanted)
