"""Recipes for models of stock layers: sharded weights travel as codes, and have the values of the codes."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from messages import naming
from selection import others_full

import gtp_jax as gtp
from gtp_jax.hlo import collectives

from ..recipes.oracles import matrix
from ..weights.row_scaled import LARGEST, RowScaledRecipe
from .recipes import (
    ALL_MESHES,
    BATCH,
    RECIPES,
    VOCAB,
    WIDTH,
    Block,
    assert_near,
    drawn_model,
    flat,
    kernel_init,
    loss,
    mean_loss,
    of_drawn_arrays,
    tokens,
    trained,
)
from .steps import MESHES, scope


class Kernels(nnx.Module):
    """A block whose result is its weights. By name, the number of dimensions of features in."""

    INPUTS = {"up": 1, "down": 1, "ragged": 1, "heads": 1, "out": 2, "conv": 3}

    def __init__(self, rngs):
        self.up = nnx.Linear(64, 256, kernel_init=kernel_init(None, "tp"), rngs=rngs)
        self.down = nnx.Linear(256, 64, kernel_init=kernel_init("tp", None), rngs=rngs)
        self.ragged = nnx.Linear(56, 40, rngs=rngs)  # ranks have no whole blocks
        self.heads = nnx.LinearGeneral(64, (4, 16), rngs=rngs)
        self.out = nnx.LinearGeneral((4, 16), 64, axis=(-2, -1), rngs=rngs)
        self.conv = nnx.Conv(8, 32, (3, 3), rngs=rngs)

    def __call__(self, x):
        return {name: x * getattr(self, name).kernel[...] for name in self.INPUTS}


class Shown(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Kernels(rngs) for _ in range(2)])

    def __call__(self, x):
        return [block(x) for block in self.blocks]


@nnx.jit
def shown():
    return Shown(nnx.Rngs(0))


def drawn(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def quantized(kernel, form, inputs=1):
    """Returns the values of a kernel's codes, of the whole kernel quantized along its features in."""
    kernel = np.asarray(kernel)
    columns = kernel.reshape(int(np.prod(kernel.shape[:inputs])), -1)
    return matrix(columns.T, form, np.float32).T.reshape(kernel.shape)


# replicas gather what one of them does, in every format
WIRES = [("gtp 4, tp 2", "FP8Blocks")]
ALL_WIRES = [*((mesh, name) for mesh in ("gtp 8", "gtp 4, tp 2") for name in RECIPES), ("dp 2, gtp 4", "NVFP4")]


@pytest.mark.parametrize("mesh, name", others_full(ALL_WIRES, WIRES))
def test_weights_in_use_are_the_codes_of_whole_weights_bit_for_bit(mesh, name):
    recipe = RECIPES[name]
    with scope(ALL_MESHES[mesh]):
        model = shown()
        with gtp.use_recipe(recipe):
            model = gtp.shard(model, "blocks.*", min_size=64)
            found = nnx.jit(lambda model, x: model(x))(model, np.float32(1))
    for block, weights in zip(model.blocks, found, strict=True):
        for kernel, inputs in Kernels.INPUTS.items():
            master = getattr(block, kernel).kernel.get_value()
            np.testing.assert_array_equal(weights[kernel], quantized(master, recipe.wire, inputs), err_msg=kernel)


INPUTS = {"heads": 1, "out": 2, "up": 1, "down": 1}


def at_codes(model, recipe):
    """Returns a copy of a model without a mesh, whose weights have the values of their codes."""
    copy = nnx.clone(model)
    for i, block in enumerate(copy.blocks):
        for name, inputs in INPUTS.items():
            if recipe.of(("blocks", str(i), name)).wire is not None:
                kernel = getattr(block, name).kernel
                kernel.set_value(jax.device_put(quantized(kernel.get_value(), recipe.wire, inputs)))
    positions = quantized(copy.positions.get_value(), recipe.wire)
    copy.positions.set_value(jax.device_put(positions))
    return copy


@pytest.mark.filterwarnings("ignore:no mesh is in scope")
@pytest.mark.parametrize(
    "name, mesh, kept", others_full(KEPT := [("NVFP4", "gtp 8", "auto"), ("MXFP8", "dp 2, gtp 4", 0)], KEPT[:1])
)
def test_gradients_are_those_at_the_values_of_the_codes(name, mesh, kept):
    recipe, model = RECIPES[name], drawn_model()
    value_and_grad = nnx.jit(nnx.value_and_grad(mean_loss))
    wanted = value_and_grad(at_codes(model, recipe), tokens())
    unquantized = value_and_grad(model, tokens())
    with scope(ALL_MESHES[mesh]), gtp.use_recipe(recipe):
        sharded = gtp.shard(model, "blocks.*", min_size=64, schedule=gtp.nn.Schedule(keep_gathered=kept))
        found = value_and_grad(sharded, tokens())
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-6)
    assert_near(flat(found[1]), flat(wanted[1]))
    assert abs(float(wanted[0] - unquantized[0])) > 1e-4  # the codes have other values


@pytest.fixture(scope="module")
def on_gtp_8():
    return trained("gtp 8", recipe=gtp.NVFP4())


STEPS = [
    ("dp 2, gtp 4", dict(microbatches=2)),
    ("dp 2, gtp 4", {}),
    ("gtp 8", dict(view="local")),
]


@pytest.mark.full
@pytest.mark.parametrize("mesh, options", STEPS)
def test_steps_on_other_meshes_with_microbatches_and_in_local_view_are_the_same(mesh, options, on_gtp_8):
    assert_near(trained(mesh, recipe=gtp.NVFP4(), **options), on_gtp_8, 1e-3)
    assert on_gtp_8["losses"][2] < on_gtp_8["losses"][0]


@pytest.mark.full
def test_a_recipe_in_scope_reaches_train_step_and_the_argument_comes_before_it():
    def lowered(around, recipe):
        with scope(MESHES["gtp 8"]), gtp.use_recipe(around):
            state = gtp.TrainState.create(of_drawn_arrays(), optax.sgd(0.1))
            return gtp.train_step(loss, optax.sgd(0.1), recipe=recipe).lower(state, tokens()).as_text()

    wanted = lowered(None, gtp.NVFP4())
    assert lowered(gtp.NVFP4(), None) == lowered(gtp.FP8(), gtp.NVFP4()) == wanted != lowered(None, None)


def gathers(recipe):
    """Returns the collectives of loss and gradients of two blocks and a tied table, and elements gathered by dtype."""

    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(2 * VOCAB, 64, rngs=rngs)
            self.blocks = nnx.List([nnx.Linear(64, 512, use_bias=False, rngs=rngs) for _ in range(2)])

        def __call__(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = jnp.tanh(jnp.tanh(block(x)).reshape(*x.shape, 8).sum(-1))
            return self.embed.attend(x)

    with scope(MESHES["gtp 8"]), gtp.use_recipe(recipe):
        model = gtp.shard(nnx.jit(lambda: Tied(nnx.Rngs(0)))(), "blocks.*", min_size=64)
        graph, state = nnx.split(model)
        batch = jax.device_put(tokens(), jax.NamedSharding(jax.sharding.get_mesh(), P("gtp")))
        gradient = jax.jit(jax.value_and_grad(lambda state, tokens: mean_loss(nnx.merge(graph, state), tokens)))
        calls = collectives(gradient.lower(state, batch).compile().as_text())
    found = {}
    for shape in (shape for call in calls if call.kind == "all-gather" for shape in call.operands):
        found[shape.dtype] = found.get(shape.dtype, 0) + shape.elements
    return calls, found


# of each of 8 ranks: codes of half a byte, and a scale for every 256 of them; sections begin at multiples of 16 bytes
KERNEL, TABLE = 64 * 512 // 8 // 2 + 64 * 512 // 8 // 256, 128 * 64 // 8 // 2 + 16


def test_codes_are_made_once_and_both_passes_move_codes_alone():
    calls, found = gathers(gtp.NVFP4(exclude=()))
    # both passes gather the blocks; forward gathers the table twice, and keeps the one with which backward begins
    assert found == {"u8": 4 * KERNEL + 2 * TABLE}
    maxima = [shape for call in calls if call.kind == "all-reduce" for shape in call.operands if shape.dims == (1,)]
    assert len(maxima) == 3  # of two blocks and the table


@pytest.mark.full
def test_excluded_modules_travel_in_their_dtype():
    _, found = gathers(gtp.NVFP4())
    assert found == {"u8": 4 * KERNEL, "f32": 2 * 128 * 64 // 8}


@pytest.mark.full
def test_second_derivatives_go_straight_through_the_codes():
    recipe = gtp.NVFP4()

    def penalty(model, x):
        graph, state = nnx.split(model)
        inner = lambda state: jnp.sin(nnx.merge(graph, state)(x)).sum()  # noqa: E731
        return sum((g**2).sum() for g in jax.tree.leaves(jax.grad(inner)(state)))

    class Blocks(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([Block(rngs) for _ in range(2)])
            self.positions = nnx.Param(jnp.ones((BATCH, WIDTH)))

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return x * self.positions[...]

    model, x = nnx.jit(lambda: Blocks(nnx.Rngs(0)))(), drawn(BATCH, WIDTH)
    gradient = nnx.jit(nnx.grad(penalty))
    wanted = flat(gradient(at_codes(model, recipe), x))
    with scope(MESHES["gtp 8"]), gtp.use_recipe(recipe):
        found = flat(gradient(gtp.shard(model, "blocks.*", min_size=64), x))
    assert_near(found, wanted, 1e-4)


@pytest.mark.parametrize("inside", [True, False], ids=["recipe in the program", "around it"])
def test_one_program_serves_no_block_about_which_the_recipe_decides_otherwise(inside):
    x = drawn(BATCH, WIDTH)
    recipe = gtp.FP8(exclude=("blocks.1",))
    around, within = (None, recipe) if inside else (recipe, None)

    @nnx.jit
    def call(block, x):
        with gtp.use_recipe(within) if inside else contextlib.nullcontext():
            return block(x)

    with scope(MESHES["gtp 8"]):
        model = of_drawn_arrays()
        plain = [np.asarray(nnx.jit(type(block).__call__)(block, x)) for block in model.blocks]
        with gtp.use_recipe(around):
            found = [np.asarray(call(block, x)) for block in model.blocks]
    same = [np.array_equal(one, other) for one, other in zip(found, plain, strict=True)]
    assert same == [False, True]


class Passing(nnx.Module):
    """A block whose method Flax wraps: it returns the variables that it was given, which is no write."""

    def __init__(self, wrap, rngs):
        self.linear, self.wrap = nnx.Linear(WIDTH, WIDTH, rngs=rngs), wrap

    def __call__(self, x):
        return self.wrap(lambda linear, x: jnp.tanh(linear(x)))(self.linear, x)


@pytest.mark.parametrize("wrap", others_full([nnx.remat, nnx.jit], [nnx.remat]))
def test_a_block_that_passes_its_weights_through_flax_keeps_its_masters(wrap):
    x = drawn(BATCH, WIDTH)
    with scope(MESHES["gtp 8"]), gtp.use_recipe(gtp.NVFP4()):
        model = nnx.jit(lambda: nnx.Sequential(*[Passing(wrap, nnx.Rngs(i)) for i in range(2)]))()
        model = gtp.shard(model, Passing, min_size=64)
        before = [np.asarray(block.linear.kernel.get_value()) for block in model.layers]
        nnx.jit(lambda model, x: model(x))(model, x)
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, x):
            gradients = nnx.grad(lambda model: jnp.mean(jnp.square(model(x) - 1)))(model)
            optimizer.update(model, gradients)
            return gradients

        after = [np.asarray(block.linear.kernel.get_value()) for block in model.layers]
        gradients = step(model, optimizer, x)
    for i, block in enumerate(model.layers):
        np.testing.assert_array_equal(after[i], before[i])
        moved = np.asarray(gradients["layers"][i]["linear"]["kernel"].get_value())
        np.testing.assert_allclose(block.linear.kernel.get_value(), before[i] - 0.1 * moved, atol=1e-6)


def test_a_format_of_ones_own_is_gathered():
    with scope(MESHES["gtp 8"]):
        model = shown()
        with gtp.use_recipe(RowScaledRecipe()):
            model = gtp.shard(model, "blocks.*", min_size=64)
            found = nnx.jit(lambda model, x: model(x))(model, np.float32(1))
    kernel = np.asarray(model.blocks[0].up.kernel.get_value())
    scale = np.abs(kernel).max(axis=0) / np.float32(LARGEST)  # of a row of features out
    np.testing.assert_allclose(
        found[0]["up"], (kernel / scale).astype(jnp.float8_e4m3fn).astype(np.float32) * scale, 1e-6
    )


def test_explain_lists_the_wire_of_sharded_weights_and_why_some_have_none():
    class Odd(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(size, 64, rngs=rngs) for size in (64, 96, 48)])
            self.short = nnx.Linear(16, 64, rngs=rngs)
            self.inner = nnx.LinearGeneral((8, 8), 64, axis=(-2, -1), rngs=rngs)
            self.odd = nnx.Linear(5, 13, rngs=rngs)  # no dimension can be divided
            self.head = nnx.Linear(64, 64, rngs=rngs)

    specs = {"inner.kernel": P(None, "gtp"), "layers.*.kernel": P("tp", "gtp")}
    with scope(ALL_MESHES["gtp 4, tp 2"]):
        model = gtp.shard(nnx.jit(lambda: Odd(nnx.Rngs(0)))(), "layers.*", min_size=64, specs=specs)
        found = gtp.explain(model, gtp.MXFP8())
        assert gtp.explain(model).weights == ()
    weights = {weight.weight: weight for weight in found.weights}
    kernel = weights["layers.0.kernel"]
    assert (kernel.shape, kernel.wire, kernel.bytes, kernel.reason) == ((64, 64), "MXFP8", 64 * 64 * 33 // 32, "")
    reasons = {
        "head.kernel": "'*head'",
        "short.kernel": "16 32 MXFP8",
        "inner.kernel": "dimension 1 rows",
        "layers.0.bias": "matrix",
        "layers.1.kernel": "tp cut MXFP8",
        "layers.2.kernel": "24 32 MXFP8",
    }
    for name, said in reasons.items():
        assert re.search(naming(said), weights[name].reason), name
    assert found.untouched == ("odd.bias", "odd.kernel")
    assert re.search(naming("layers.0.kernel '*head'"), str(found))
