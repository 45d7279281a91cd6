"""Matmuls over tp whose sequence moves part by part, against collectives that move it at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from messages import naming
from selection import every, others_full, pairwise

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.collectives import (
    gather_linear,
    gather_linear_fp8,
    join_parts,
    linear_scatter,
    linear_scatter_fp8,
    split_parts,
)
from gtp_jax.formats import FP8_E4M3, FP8_E5M2
from gtp_jax.ops import linear, linear_fp8

BATCH, SEQ, INTO, OUT = 2, 16, 24, 40
CUT, FEATURES = P(None, "tp"), P(None, None, "tp")


def on_mesh(tp: int, function, into, out):
    mesh = gtp.make_mesh(gtp=1, tp=tp, devices=jax.devices()[:tp])
    return mesh, jax.shard_map(function, mesh=mesh, in_specs=into, out_specs=out, check_vma=False)


def value_and_gradients(tp: int, function, x, w, into, out):
    """What a function of a rank's input and weight returns, and the gradients of both for random weights of it."""
    mesh, mapped = on_mesh(tp, function, into, out)

    @jax.jit
    def run(x, w):
        y, transpose = jax.vjp(mapped, x, w)
        return y, transpose(jax.random.normal(jax.random.key(9), y.shape, y.dtype))

    with jax.set_mesh(mesh):
        return jax.tree.map(np.asarray, run(x, w))


@pytest.fixture
def operands(x64, key):
    a, b = jax.random.split(key)
    return jax.random.normal(a, (BATCH, SEQ, INTO)), jax.random.normal(b, (OUT, INTO))


def agree(found, wanted):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), found, wanted)


@pytest.mark.parametrize("tp", others_full([4, 1, 8], [4]))
def test_a_sequence_gathered_in_parts_meets_the_weight_as_at_once(tp, operands):
    specs = (CUT, P("tp")), FEATURES
    in_parts = lambda x, w: join_parts(gather_linear(x, w, "tp"), "tp")  # noqa: E731
    at_once = lambda x, w: linear(lax.all_gather(x, "tp", axis=1, tiled=True), w)  # noqa: E731
    agree(value_and_gradients(tp, in_parts, *operands, *specs), value_and_gradients(tp, at_once, *operands, *specs))


@pytest.mark.parametrize("tp", others_full([4, 1, 8], [4]))
def test_a_product_summed_in_parts_is_that_summed_at_once(tp, operands):
    specs = (FEATURES, P(None, "tp")), CUT
    in_parts = lambda x, w: linear_scatter(split_parts(x, "tp"), w, "tp")  # noqa: E731
    at_once = lambda x, w: lax.psum_scatter(linear(x, w), "tp", scatter_dimension=1, tiled=True)  # noqa: E731
    agree(value_and_gradients(tp, in_parts, *operands, *specs), value_and_gradients(tp, at_once, *operands, *specs))


def of_each_part(tp: int, x, w, gradients):
    """FP8 products of the parts of a whole sequence, each with its own scales."""
    return jnp.concatenate([linear_fp8(part, w, gradients) for part in jnp.split(x, tp, axis=1)], axis=1)


@pytest.mark.parametrize("tp, gradients", pairwise([4, 1], [FP8_E5M2, FP8_E4M3], usual=1))
def test_codes_gathered_in_parts_give_the_products_of_each_part(tp, gradients, operands):
    specs = (CUT, P("tp")), FEATURES
    in_parts = lambda x, w: join_parts(gather_linear_fp8(x, w, gradients, "tp"), "tp")  # noqa: E731
    at_once = lambda x, w: of_each_part(tp, lax.all_gather(x, "tp", axis=1, tiled=True), w, gradients)  # noqa: E731
    agree(value_and_gradients(tp, in_parts, *operands, *specs), value_and_gradients(tp, at_once, *operands, *specs))


@pytest.mark.parametrize("tp, gradients", pairwise([4, 1], [FP8_E5M2, FP8_E4M3], usual=1))
def test_fp8_products_summed_in_parts_are_those_of_each_part(tp, gradients, operands):
    specs = (FEATURES, P(None, "tp")), CUT
    in_parts = lambda x, w: linear_scatter_fp8(split_parts(x, "tp"), w, gradients, "tp")  # noqa: E731
    scatter = functools.partial(lax.psum_scatter, axis_name="tp", scatter_dimension=1, tiled=True)
    at_once = lambda x, w: scatter(of_each_part(tp, x, w, gradients))  # noqa: E731
    agree(value_and_gradients(tp, in_parts, *operands, *specs), value_and_gradients(tp, at_once, *operands, *specs))


@pytest.mark.parametrize("parallel, codes", every(2, [("column", 2), ("row", 1)]))
def test_what_is_gathered_of_the_sequence_travels_as_fp8_codes(parallel, codes, key):
    mesh, width = gtp.make_mesh(gtp=2, tp=4), 32
    with jax.set_mesh(mesh), gtp.use_recipe(gtp.FP8(matmuls=True)):
        graph, state = nnx.split(layer(parallel))
        loss = lambda state, x: jnp.sum(jnp.square(nnx.merge(graph, state)(x).astype(jnp.float32)))  # noqa: E731
        x = jax.random.normal(key, (4, 8, width), jnp.bfloat16)
        text = jax.jit(jax.grad(loss, (0, 1))).lower(state, x).compile().as_text()
    hops = [c for c in hlo.collectives(text) if c.axes == ("tp",) and c.kind == "collective-permute"]
    arrays = [c for c in hops if sum(shape.elements for shape in c.operands) > 1]  # an amax travels with each part
    # three hops each: the input in forward and in backward, or the gradient; and the sum, in backward or in forward
    assert (sum(c.dtype == "u8" for c in arrays), sum(c.dtype != "u8" for c in arrays)) == (3 * codes, 3)


def layer(parallel: str, **options) -> nnx.Module:
    return gtp.init(lambda rngs: gtp.Dense(32, 32, parallel=parallel, rngs=rngs, **options), nnx.Rngs(0))


SEQUENCE, NONE, WHOLE = ((4, 8, 32), {}), ((4, 32), {}), ((4, 8, 32), dict(sequence_parallel=False))


@pytest.mark.parametrize("given, parallel", pairwise([SEQUENCE, WHOLE, NONE], ["column", "row"], usual=2))
def test_only_a_sequence_cut_over_tp_moves_in_parts(given, parallel, key):
    (shape, options), in_parts = given, given is SEQUENCE
    with jax.set_mesh(gtp.make_mesh(gtp=2, tp=4)):
        graph, state = nnx.split(layer(parallel, **options))
        call = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
        text = call.lower(state, jax.random.normal(key, shape, jnp.bfloat16)).compile().as_text()
    found = [c for c in hlo.collectives(text) if c.axes == ("tp",)]
    hops = [c for c in found if c.kind == "collective-permute"]
    assert (len(hops) == 3 and len(found) == 3) if in_parts else not hops


def loss_and_gradients(exclude: tuple[str, ...], x: np.ndarray):
    """Those of an MLP over tp that multiplies in FP8 but for the layers that are kept."""
    tp = jax.sharding.get_mesh().shape["tp"]

    def loss(mlp, batch):
        own = jax.lax.axis_index("tp") * (SEQ // tp)
        y = mlp(lax.dynamic_slice_in_dim(batch["x"], own, SEQ // tp, 1))
        return jnp.sum(jnp.sin(y)), jnp.float32(1)

    mlp = gtp.init(lambda rngs: gtp.MLP(32, 64, dtype=jnp.float32, rngs=rngs), nnx.Rngs(0))
    state = gtp.TrainState.create(mlp, optax.sgd(1.0))
    recipe = gtp.FP8(matmuls=True, exclude=exclude)
    run = jax.jit(lambda state, batch: gtp.train.loss_and_gradients(loss, state, batch, recipe=recipe, view="local"))
    return jax.tree.map(np.asarray, run(state, {"x": x}))


@pytest.mark.full
@pytest.mark.parametrize("exclude", every(2, [(("down",),), (("up",),)]))
def test_layers_in_formats_go_with_layers_whose_sequence_moves_in_parts(exclude, monkeypatch):
    x = np.random.default_rng(0).normal(size=(4, SEQ, 32)).astype(np.float32)
    with jax.set_mesh(gtp.make_mesh(gtp=2, tp=4)):
        found = loss_and_gradients(exclude, x)
        monkeypatch.setattr(gtp.Dense, "moves_in_parts", lambda self, x: False)
        at_once = loss_and_gradients(exclude, x)
    # sums in another order may round to another code of FP8 here and there
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.01, atol=0.01 * np.abs(b).max()), found, at_once)


def test_more_than_two_parts_lose_nothing_of_a_bfloat16_weight_gradient(key):
    a, b, c = jax.random.split(key, 3)
    x, w = jax.random.normal(a, (2, 1024, 64), jnp.bfloat16), jax.random.normal(b, (64, 64), jnp.bfloat16)
    dy = jax.random.normal(c, (2, 1024, 64), jnp.bfloat16)
    wanted = np.einsum("bsf,bsd->fd", np.asarray(dy, np.float64), np.asarray(x, np.float64))

    def error(tp: int) -> float:
        function = lambda x, w: join_parts(gather_linear(x, w, "tp"), "tp")  # noqa: E731
        mesh, mapped = on_mesh(tp, function, (CUT, P("tp")), FEATURES)
        with jax.set_mesh(mesh):
            found = np.asarray(jax.jit(lambda x, w, dy: jax.vjp(mapped, x, w)[1](dy)[1])(x, w, dy), np.float64)
        return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))

    assert error(8) < 1.05 * error(1) < 3e-3


def test_a_sequence_that_tp_does_not_divide_is_refused_behind_a_row_parallel_layer(key):
    with jax.set_mesh(gtp.make_mesh(gtp=2, tp=4)):
        row = layer("row")
        with pytest.raises(ValueError, match=naming("(2, 6, 8) tp 4 Pad")):
            row(jax.random.normal(key, (4, 6, 32)))
