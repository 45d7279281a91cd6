"""Matmuls over tp whose sequence moves part by part, against collectives that move it at once."""

import collections
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
    gather_linear_blocks,
    gather_linear_fp8,
    join_parts,
    linear_scatter,
    linear_scatter_blocks,
    linear_scatter_fp8,
    split_parts,
)
from gtp_jax.formats import FP8_E4M3, FP8_E5M2
from gtp_jax.nn import abstract_model
from gtp_jax.ops import BlockProducts, Fp8Products, TileProducts, linear, linear_rounded

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


def of_each_part(tp: int, x, w, products):
    """FP8 products of the parts of a whole sequence, each with its own scales."""
    return jnp.concatenate([linear_rounded(part, w, products) for part in jnp.split(x, tp, axis=1)], axis=1)


E4M3, E5M2 = (Fp8Products(form, keep_codes=False) for form in (FP8_E4M3, FP8_E5M2))


@pytest.mark.parametrize("tp, products", pairwise([4, 1], [E5M2, E4M3], usual=1))
def test_codes_gathered_in_parts_give_the_products_of_each_part(tp, products, operands):
    specs = (CUT, P("tp")), FEATURES
    in_parts = lambda x, w: join_parts(gather_linear_fp8(x, w, products, "tp"), "tp")  # noqa: E731
    at_once = lambda x, w: of_each_part(tp, lax.all_gather(x, "tp", axis=1, tiled=True), w, products)  # noqa: E731
    agree(value_and_gradients(tp, in_parts, *operands, *specs), value_and_gradients(tp, at_once, *operands, *specs))


@pytest.mark.parametrize("tp, products", pairwise([4, 1], [E5M2, E4M3], usual=1))
def test_fp8_products_summed_in_parts_are_those_of_each_part(tp, products, operands):
    specs = (FEATURES, P(None, "tp")), CUT
    in_parts = lambda x, w: linear_scatter_fp8(split_parts(x, "tp"), w, products, "tp")  # noqa: E731
    scatter = functools.partial(lax.psum_scatter, axis_name="tp", scatter_dimension=1, tiled=True)
    at_once = lambda x, w: scatter(of_each_part(tp, x, w, products))  # noqa: E731
    agree(value_and_gradients(tp, in_parts, *operands, *specs), value_and_gradients(tp, at_once, *operands, *specs))


def in_blocks(name):
    """The products of a recipe with blocks, and operands whose quarters are two examples of whole blocks of tokens."""
    mxfp8 = gtp.MXFP8(matmuls=True).operands
    products, length = {
        "tiles": (TileProducts(), 512),
        "mxfp8": (BlockProducts.of(jnp.zeros(2, jnp.uint32), mxfp8), 128),
    }[name]
    a, b = jax.random.split(jax.random.key(3))
    return products, jax.random.normal(a, (BATCH, length, INTO)), jax.random.normal(b, (OUT, INTO))


def the_same(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert all(a.any() for a in jax.tree.leaves(found))


@pytest.mark.parametrize("name", others_full(["tiles", "mxfp8"], ["tiles"]))
def test_codes_with_blocks_are_those_of_the_gathered_sequence_bit_for_bit(name):
    products, x, w = in_blocks(name)
    specs = (CUT, P("tp")), FEATURES
    as_codes = lambda x, w: gather_linear_blocks(x, w, products, "tp")  # noqa: E731
    as_values = lambda x, w: linear_rounded(lax.all_gather(x, "tp", axis=1, tiled=True), w, products)  # noqa: E731
    the_same(value_and_gradients(4, as_codes, x, w, *specs), value_and_gradients(4, as_values, x, w, *specs))


@pytest.mark.parametrize("name", others_full(["tiles", "mxfp8"], ["mxfp8"]))
def test_codes_with_blocks_of_the_gradient_are_those_of_the_gathered_one_bit_for_bit(name):
    products, x, w = in_blocks(name)
    specs = (FEATURES, P(None, "tp")), CUT
    scatter = functools.partial(lax.psum_scatter, axis_name="tp", scatter_dimension=1, tiled=True)
    as_codes = lambda x, w: linear_scatter_blocks(x, w, products, "tp")  # noqa: E731
    as_values = lambda x, w: scatter(linear_rounded(x, w, products))  # noqa: E731
    the_same(value_and_gradients(4, as_codes, x, w, *specs), value_and_gradients(4, as_values, x, w, *specs))


# The codes of 256 tokens of 512 features, and their scales.
CODES = 256 * 512
SCALES = {
    "fp8": (gtp.FP8(matmuls=True), ("f32", 1)),
    "tiles": (gtp.recipes.FP8Blocks(), ("f32", CODES // 128)),
    "mxfp8": (gtp.MXFP8(matmuls=True), ("u8", CODES // 32)),
}


@pytest.mark.parametrize("parallel, name", pairwise(["column", "row"], SCALES))
def test_what_is_gathered_of_the_sequence_travels_as_codes_with_their_scales(parallel, name, key):
    recipe, scales = SCALES[name]
    with jax.set_mesh(gtp.make_mesh(gtp=2, tp=4)), gtp.use_recipe(recipe):
        graph, state = nnx.split(layer(parallel, width=512))
        loss = lambda state, x: jnp.sum(jnp.square(nnx.merge(graph, state)(x).astype(jnp.float32)))  # noqa: E731
        x = jax.random.normal(key, (4, 512, 512), jnp.bfloat16)
        text = jax.jit(jax.grad(loss, (0, 1))).lower(state, x).compile().as_text()
    over_tp = [c for c in hlo.collectives(text) if c.axes == ("tp",)]
    sums = [c for c in over_tp if c.kind == "reduce-scatter"]
    sent = collections.Counter((shape.dtype, shape.elements) for c in over_tp if c not in sums for shape in c.operands)
    # the input in forward and in backward, or the gradient, in two copies if blocks run along two dimensions
    copies = 1 if name == "fp8" and parallel == "row" else 2
    wanted = collections.Counter(copies * [("u8", CODES), scales])
    if name == "fp8":  # in three hops; and the sum, in backward or in forward
        (values,) = {one for one in sent if one[0] != "u8" and one[1] == CODES}
        assert sent == collections.Counter(3 * [*wanted.elements(), values])
    else:
        assert sent == wanted and len(sums) == 1 and {c.kind for c in over_tp} == {"all-gather", "reduce-scatter"}


def layer(parallel: str, width: int = 32, **options) -> nnx.Module:
    return gtp.init(lambda rngs: gtp.Dense(width, width, parallel=parallel, rngs=rngs, **options), nnx.Rngs(0))


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


# Recipes, tokens of a part, and whether they move as codes with blocks.
ALIGNED = [
    (gtp.FP8(matmuls=True), 128, False),
    (gtp.FP8(), 128, False),
    (gtp.recipes.FP8Blocks(), 256, True),
    (gtp.recipes.FP8Blocks(), 192, False),
    (gtp.MXFP8(matmuls=True), 96, True),
    (gtp.MXFP8(matmuls=True), 48, False),
    (gtp.NVFP4(matmuls=True, stochastic=False), 128, False),
]


def test_codes_with_blocks_move_only_where_no_block_of_tokens_is_cut():
    with jax.set_mesh(gtp.make_mesh(gtp=2, tp=4)):
        mlp = abstract_model(lambda rngs: gtp.MLP(32, 512, rngs=rngs))
        for recipe, tokens, moves in ALIGNED:
            part, whole = jnp.zeros((2, tokens, 32)), jnp.zeros((2, 4 * tokens, 32))
            with gtp.use_recipe(recipe):
                found = [mlp.up.moves_as_codes(part), *map(mlp.down.moves_as_codes, (part, whole), (4, 1))]
            assert found == [moves] * 3, (recipe, tokens)
    assert not gtp.recipes.FP8Delayed().operands.blocks_divide(128)


def loss_and_gradients(recipe: gtp.recipes.Recipe, x: np.ndarray):
    """Those of an MLP over tp that multiplies in a recipe."""
    tp, length = jax.sharding.get_mesh().shape["tp"], x.shape[1]

    def loss(mlp, batch):
        own = jax.lax.axis_index("tp") * (length // tp)
        y = mlp(lax.dynamic_slice_in_dim(batch["x"], own, length // tp, 1))
        return jnp.sum(jnp.sin(y)), jnp.float32(1)

    mlp = gtp.init(lambda rngs: gtp.MLP(32, 512, dtype=x.dtype, rngs=rngs), nnx.Rngs(0))
    state = gtp.TrainState.create(mlp, optax.sgd(1.0))
    run = jax.jit(lambda state, batch: gtp.train.loss_and_gradients(loss, state, batch, recipe=recipe, view="local"))
    return jax.tree.map(np.asarray, run(state, {"x": x}))


def with_and_without(how: str, recipe, x, monkeypatch):
    """Those where the sequence moves in this way, and where it moves as values at once."""
    with jax.set_mesh(gtp.make_mesh(gtp=2, tp=4)):
        found = loss_and_gradients(recipe, x)
        monkeypatch.setattr(gtp.Dense, how, lambda *_, **__: False)
        return found, loss_and_gradients(recipe, x)


@pytest.mark.full
@pytest.mark.parametrize("exclude", every(2, [(("down",),), (("up",),)]))
def test_layers_in_formats_go_with_layers_whose_sequence_moves_in_parts(exclude, monkeypatch):
    x = np.random.default_rng(0).normal(size=(4, SEQ, 32)).astype(np.float32)
    recipe = gtp.FP8(matmuls=True, exclude=exclude)
    found, at_once = with_and_without("moves_in_parts", recipe, x, monkeypatch)
    # sums in another order may round to another code of FP8 here and there
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.01, atol=0.01 * np.abs(b).max()), found, at_once)


@pytest.mark.parametrize("recipe", others_full([gtp.recipes.FP8Blocks(), gtp.MXFP8(matmuls=True)], []), ids=type)
def test_a_step_in_blocks_is_the_same_bit_for_bit_as_codes_and_as_values(recipe, monkeypatch):
    x = np.random.default_rng(0).normal(size=(4, 512, 32)).astype(np.float32)
    the_same(*with_and_without("moves_as_codes", recipe, x, monkeypatch))


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
