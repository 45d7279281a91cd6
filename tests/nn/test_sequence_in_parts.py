"""Matmuls over tp whose sequence moves part by part, against collectives that move it at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import gtp_jax as gtp
from gtp_jax import plan
from gtp_jax.collectives import gather_linear, join_parts, linear_scatter, split_parts
from gtp_jax.ops import linear

BATCH, SEQ, INTO, OUT = 2, 16, 12, 40
CUT, FEATURES = P(None, "tp"), P(None, None, "tp")


def on_mesh(tp: int, function, into, out):
    mesh = gtp.make_mesh(gtp=1, tp=tp, devices=jax.devices()[:tp])
    return mesh, jax.shard_map(function, mesh=mesh, in_specs=into, out_specs=out, check_vma=False)


def value_and_gradients(tp: int, function, x, w, into, out):
    """What a function of a rank's input and weight returns, and the gradients of both for random weights of it."""
    mesh, mapped = on_mesh(tp, function, into, out)
    with jax.set_mesh(mesh):
        y, transpose = jax.vjp(jax.jit(mapped), x, w)
        return jax.tree.map(np.asarray, (y, transpose(jax.random.normal(jax.random.key(9), y.shape, y.dtype))))


@pytest.fixture
def operands(x64, key):
    a, b = jax.random.split(key)
    return jax.random.normal(a, (BATCH, SEQ, INTO)), jax.random.normal(b, (OUT, INTO))


def agree(found, wanted):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), found, wanted)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_sequence_gathered_in_parts_meets_the_weight_as_at_once(tp, operands):
    specs = (CUT, P("tp")), FEATURES
    in_parts = lambda x, w: join_parts(gather_linear(x, w))  # noqa: E731
    at_once = lambda x, w: linear(lax.all_gather(x, "tp", axis=1, tiled=True), w)  # noqa: E731
    agree(value_and_gradients(tp, in_parts, *operands, *specs), value_and_gradients(tp, at_once, *operands, *specs))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_product_summed_in_parts_is_that_summed_at_once(tp, operands):
    specs = (FEATURES, P(None, "tp")), CUT
    in_parts = lambda x, w: linear_scatter(split_parts(x), w)  # noqa: E731
    at_once = lambda x, w: lax.psum_scatter(linear(x, w), "tp", scatter_dimension=1, tiled=True)  # noqa: E731
    agree(value_and_gradients(tp, in_parts, *operands, *specs), value_and_gradients(tp, at_once, *operands, *specs))


@pytest.mark.parametrize("tp", [2, 8])
def test_parts_are_counted_backwards_from_the_own_one_and_join_in_order(tp, key):
    x = jax.random.normal(key, (BATCH, SEQ, 3))
    mesh, mapped = on_mesh(
        tp, lambda x: (jnp.stack(split_parts(x))[None], join_parts(split_parts(x))), P(), (P("tp"), P())
    )
    with jax.set_mesh(mesh):
        parts, joined = mapped(x)
    by_rank = np.split(np.asarray(x), tp, axis=1)
    for rank in range(tp):
        for s in range(tp):
            np.testing.assert_array_equal(parts[rank, s], by_rank[(rank - s) % tp])
    np.testing.assert_array_equal(joined, x)


def layer(parallel: str, **options) -> nnx.Module:
    return gtp.init(lambda rngs: gtp.Dense(32, 32, parallel=parallel, rngs=rngs, **options), nnx.Rngs(0))


@pytest.mark.parametrize("parallel", ["column", "row"])
@pytest.mark.parametrize(
    "shape, options, in_parts",
    [((4, 8, 32), {}, True), ((4, 32), {}, False), ((4, 8, 32), dict(sequence_parallel=False), False)],
    ids=["sequence", "no sequence", "whole sequence"],
)
def test_only_a_sequence_cut_over_tp_moves_in_parts(parallel, shape, options, in_parts, key):
    with jax.set_mesh(gtp.make_mesh(gtp=2, tp=4)):
        graph, state = nnx.split(layer(parallel, **options))
        call = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
        text = call.lower(state, jax.random.normal(key, shape, jnp.bfloat16)).compile().as_text()
    found = [c for c in plan.collectives(text) if c.axes == ("tp",) or c.kind == "collective-permute"]
    hops = [c for c in found if c.kind == "collective-permute"]
    assert (len(hops) == 3 and len(found) == 3) if in_parts else not hops
