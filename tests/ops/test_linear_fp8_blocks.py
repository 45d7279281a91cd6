"""FP8 matmuls in blocks of 128 multiply what the oracle says the operands are rounded to, along each contraction."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import naming
from selection import others_full

import gtp_jax as gtp
from gtp_jax.chain import with_remat
from gtp_jax.formats import FP8_BLOCKS, QuantizedArray
from gtp_jax.ops import Order, SlottedWeight, linear_fp8_blocks

from .oracle import rounded_blocked

TILES, RUNS = (128, 128), (1, 128)


def close(found, wanted):
    found = np.asarray(found, np.float64).reshape(wanted.shape)
    return np.linalg.norm(found - wanted) <= 1e-6 * np.linalg.norm(wanted)


def numbers(*shapes):
    rng = np.random.default_rng(0)
    return [(rng.normal(size=shape) * np.exp(3 * rng.normal(size=shape))).astype(np.float32) for shape in shapes]


def products(x, w, g):
    """Forward, dgrad and wgrad of rows, by the table of `linear_fp8_blocks`."""
    tiles = rounded_blocked(w, TILES)
    forward = rounded_blocked(x, RUNS) @ tiles.T
    dgrad = rounded_blocked(g, RUNS) @ tiles
    return forward, dgrad, rounded_blocked(g.T, RUNS) @ rounded_blocked(x.T, RUNS).T


@pytest.mark.parametrize(
    "tokens, width, out", others_full([(150, 300, 200), (128, 256, 128), (1, 5, 3)], [(150, 300, 200)])
)
def test_each_product_multiplies_operands_rounded_along_its_contraction(tokens, width, out):
    x, w, g = numbers((tokens, width), (out, width), (tokens, out))

    @jax.jit
    def run(x, w, g):
        y, back = jax.vjp(linear_fp8_blocks, x, w)
        return y, *back(g)

    for found, wanted in zip(run(x, w, g), products(x, w, g), strict=True):
        assert close(found, wanted)


def in_kernels(w, rows):
    """The codes of several kernels, with tiles that begin at each kernel's first row."""
    kernels = [gtp.ops.quantize(jnp.asarray(part), FP8_BLOCKS) for part in np.split(w, np.cumsum(rows)[:-1])]
    codes, scales = (np.concatenate([getattr(one, name) for one in kernels]) for name in ("codes", "scales"))
    return QuantizedArray(jnp.asarray(codes), jnp.asarray(scales), None, FP8_BLOCKS, w.shape)


@pytest.mark.parametrize(
    "rows, ranks",
    others_full([((72, 200, 128), 1), ((72, 200, 128), 4), ((128, 256), 8), ((5, 3), 1)], [((72, 200, 128), 4)]),
    ids=str,
)
def test_kernels_that_share_codes_have_tiles_and_features_of_their_own(rows, ranks):
    x, w, g = numbers((20, 140), (sum(rows), 140), (20, sum(rows)))
    weight = in_kernels(w, rows)

    @jax.jit
    def run(x, g):
        product = lambda x, slot: linear_fp8_blocks(x, SlottedWeight(weight, slot), Order(rows, ranks))  # noqa: E731
        y, back = jax.vjp(product, x, jnp.zeros(w.shape))
        return y, *back(g)

    starts = np.cumsum((0, *rows))
    each = [products(x, w[i:j], g[:, i:j]) for i, j in zip(starts[:-1], starts[1:], strict=True)]
    # features in the order of the ranks' parts
    size = np.array(rows) // ranks
    order = np.concatenate(
        [i + r * s + np.arange(s) for r in range(ranks) for i, s in zip(starts[:-1], size, strict=True)]
    )
    y, to_x, to_w = run(x, g[:, order])
    assert close(y, np.concatenate([y for y, _, _ in each], axis=1)[:, order])
    # what wgrad multiplies does not depend on the order; dgrad's runs lie within kernels
    assert close(to_x, sum(dgrad for _, dgrad, _ in each))
    assert close(to_w, np.concatenate([wgrad for _, _, wgrad in each])[order])


@pytest.mark.full
def test_wgrad_leaves_in_the_dtype_of_the_slot():
    x, w, g = (jnp.asarray(a, jnp.bfloat16) for a in numbers((256, 128), (128, 128), (256, 128)))
    weight, slot = gtp.ops.quantize(w, FP8_BLOCKS), jnp.zeros(w.shape, jnp.float32)
    y, back = jax.vjp(lambda x, s: linear_fp8_blocks(x, SlottedWeight(weight, s)), x, slot)
    to_x, to_w = back(g)
    assert y.dtype == to_x.dtype == jnp.bfloat16 and to_w.dtype == jnp.float32
    assert close(to_w, products(*(np.asarray(a, np.float32) for a in (x, w, g)))[2])
    assert np.any(to_w != to_w.astype(jnp.bfloat16).astype(jnp.float32))


def test_policies_that_save_matmuls_save_the_output_and_not_what_a_kernel_or_the_reference_makes_it_of():
    x, w = jnp.ones((256, 128), jnp.bfloat16), jnp.ones((384, 128), jnp.bfloat16)
    run = with_remat(lambda x, w: jnp.sin(linear_fp8_blocks(x, w)), "matmuls")
    saved = jax.tree.leaves(jax.eval_shape(lambda x, w: jax.vjp(run, x, w)[1], x, w))
    outputs = [leaf.dtype for leaf in saved if 256 in leaf.shape and 384 in leaf.shape]
    assert outputs == [jnp.bfloat16]


def test_a_second_derivative_is_refused():
    x, w = jnp.ones((2, 128)), jnp.ones((128, 128))
    for argument in (0, 1):
        run = jax.grad(lambda *a: jnp.sum(linear_fp8_blocks(*a) ** 2), argument)
        with pytest.raises(TypeError, match=naming("derivative")):
            jax.jit(jax.grad(lambda *a, run=run: jnp.sum(run(*a) ** 2), argument)).lower(x, w)


def test_operands_of_every_rank_and_dtype_are_multiplied():
    x = jnp.ones((2, 3, 130), jnp.float16)
    assert jax.jit(linear_fp8_blocks)(x, jnp.ones((7, 130), jnp.float16)).shape == (2, 3, 7)
    with pytest.raises(NotImplementedError, match=naming("'linear_fp8_blocks'")):
        linear_fp8_blocks(x, jnp.ones((7, 130), jnp.float16), implementation="native")
    empty = jax.jit(functools.partial(linear_fp8_blocks, jnp.ones((0, 130))))
    assert empty(jnp.ones((7, 130))).shape == (0, 7)
