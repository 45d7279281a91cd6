"""Steps of weights that the ranks of `gtp.shard` do not divide, which are stored padded, are those of one device.

Recipes send and multiply the same codes of them, whether they are stored padded or not.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from padded_states import moved, same
from selection import pairwise

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.hook import sharded_weights

from .padded import (
    F64,
    LENGTH,
    MESHES,
    OPTIMIZERS,
    WIDTH,
    Stacked,
    assert_same_steps,
    batches,
    loss,
    make,
    on,
)

# the stored shapes of some weights of `Model` on each mesh, of which the last one has annotations for tp
SHAPES = {
    "gtp 7": {
        "['blocks']['0']['up']['kernel']": (26, 35),
        "['blocks']['0']['attention']['out']['kernel']": (2, 13, 28),
    },
    "gtp 3, dp 2": {"['blocks']['0']['up']['kernel']": (26, 36), "['last']['kernel']": (30, 26)},
    "gtp 3, tp 2": {"['blocks']['0']['up']['kernel']": (27, 34), "['blocks']['0']['down']['kernel']": (34, 27)},
}


@pytest.mark.parametrize(("mesh", "name", "view"), pairwise(MESHES, OPTIMIZERS, ["global", "local"], usual=1))
def test_steps_of_padded_weights_are_those_of_one_device(mesh, name, view, x64):
    assert SHAPES[mesh].items() <= assert_same_steps(name, mesh, view=view).items()


OPTIONS = {
    "2 microbatches": dict(microbatches=2),
    "7 microbatches": dict(microbatches=7),
    "sums in float32": dict(shard=(("grad_reduce", "float32"),)),
    "everything saved": dict(shard=(("remat", "everything"), ("schedule", gtp.nn.Schedule(keep_gathered=0)))),
}


CASES = [
    ("2 microbatches", "global"),
    ("7 microbatches", "local"),  # each of six ranks has seven rows
    *((name, view) for view in ("local", "global") for name in ("sums in float32", "everything saved")),
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "view"), CASES)
def test_options_do_not_change_steps_of_padded_weights(name, view, x64):
    assert_same_steps("adamw", "gtp 3, dp 2", view=view, **OPTIONS[name])


@pytest.mark.parametrize(
    ("mesh", "name", "view"), pairwise(["gtp 7", "gtp 3, dp 2"], OPTIMIZERS, ["local", "global"], usual=1)
)
def test_steps_of_stacked_weights_that_a_scan_slices_are_those_of_one_device(mesh, name, view, x64):
    shapes = assert_same_steps(name, mesh, kind=Stacked, view=view)
    assert shapes["['layers']['kernel']"] == {"gtp 7": (5, 26, 28), "gtp 3, dp 2": (5, 26, 30)}[mesh]


@pytest.mark.full
def test_calls_outside_of_steps_are_those_without_a_mesh(x64):
    tokens = batches(1)[0]
    call = lambda function, model: nnx.jit(function)(model)  # noqa: E731
    with on(gtp=1):
        wanted = np.asarray(call(lambda model: model(tokens), make()))
    with on(gtp=7):
        model = make()
        same(call(lambda model: model(tokens), model), wanted)
        same(call(lambda model: jax.vmap(lambda one: model(one[None])[0])(tokens), model), wanted)
        same(call(lambda model: nnx.remat(lambda model: model(tokens))(model), model), wanted)
        with gtp.hook.without_hook():
            same(nnx.jit(lambda model: model(tokens))(model), wanted)
        with gtp.layout.even_shares(False):
            same(nnx.jit(lambda model: model(tokens))(model), wanted)


@pytest.mark.full
def test_a_gradient_of_padded_weights_is_differentiated_again_as_on_one_device(x64):
    x, found = np.random.default_rng(0).normal(size=(7, LENGTH, WIDTH)), []

    def penalty(state, graph):
        model = lambda x: jnp.sum(jnp.sin(nnx.merge(graph, state).last(x)))  # noqa: E731
        return jnp.sum(jax.grad(model)(x) ** 2) + model(x)

    for degree in (1, 7):
        with on(gtp=degree):
            graph, state = nnx.split(make())
            gradient = jax.jit(jax.grad(functools.partial(penalty, graph=graph)))(state)["last"]["kernel"]
            stored = np.asarray(gradient.get_raw_value())
            assert stored.shape == ((26, 26) if degree == 1 else (28, 26)) and not stored[26:].any()
            found.append(np.asarray(gradient[...]))
    assert np.abs(found[0]).max() > 1
    same(found[1], found[0])


def test_the_first_dimension_is_padded_only_if_it_is_not_that_of_layers():
    class Layers(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.split_rngs(splits=20)(nnx.vmap(lambda rngs: nnx.Linear(64, 64, rngs=rngs)))(rngs)
            self.one = nnx.LinearGeneral(20, (64, 64), use_bias=False, rngs=rngs)

    with on(gtp=7):
        model = gtp.nn.abstract_model(lambda rngs: gtp.shard(Layers(rngs), "layers", min_size=1))
    stored = jax.tree.map(jnp.shape, nnx.as_pure(nnx.state(model)))
    assert stored == {"layers": {"bias": (20, 70), "kernel": (20, 64, 70)}, "one": {"kernel": (21, 64, 64)}}


class Writing(nnx.Module):
    """A model whose blocks write their weights, and which writes a weight that it holds itself."""

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs, **F64)

        def __call__(self, x):
            self.linear.kernel[...] = 0.5 * self.linear.kernel[...]
            return self.linear(x)

    def __init__(self, rngs):
        self.blocks = nnx.List([self.Block(rngs) for _ in range(2)])
        self.scale = nnx.Param(jax.random.normal(rngs.params(), (5, WIDTH), jnp.float64))

    def __call__(self, x):
        self.scale[...] = self.scale[...] + 1
        for block in self.blocks:
            x = block(x * self.scale[2])
        return x


def test_a_weight_that_a_call_writes_is_padded_again(x64):
    x, found = np.random.default_rng(0).normal(size=(7, WIDTH)), []
    for degree in (1, 7):
        with on(gtp=degree):
            model = make(Writing)
            y = nnx.jit(lambda model: model(x))(model)
            arrays = [v.get_raw_value() for _, v in nnx.to_flat_state(nnx.state(model))]
            assert [a.shape for a in arrays] == [
                *[(26,), (26 if degree == 1 else 28, 26)] * 2,
                (5, arrays[-1].shape[1]),
            ]
            found.append(jax.tree.map(np.asarray, (y, model.scale[...], model.blocks[0].linear.kernel[...])))
            assert not np.asarray(arrays[1])[26:].any() and not np.asarray(arrays[-1])[:, 26:].any()
    same(found[1], found[0])


@pytest.mark.full
@pytest.mark.parametrize("degrees", [(7, 5, 1), (7, 5, 8, 1, 7)])
def test_a_checkpoint_is_logical_and_moves_between_degrees(degrees, tmp_path, x64):
    optimizer, meshes = optax.sgd(1e-2, momentum=0.9), (on(gtp=degree) for degree in degrees)
    with Checkpoints(tmp_path) as checkpoints:
        kept = moved(checkpoints, meshes, lambda number: gtp.TrainState.create(make(seed=number), optimizer))
        stored = checkpoints.arrays(len(degrees) - 1)["params/last/kernel"]
        assert stored.shape == (26, 26)
        same(stored.read(0, 26), kept.params["last"]["kernel"], 0)


@pytest.mark.full
def test_an_nnx_state_is_saved_in_logical_shapes(tmp_path, x64):
    with Checkpoints(tmp_path) as checkpoints:
        with on(gtp=7):
            model = make()
            wanted = np.asarray(model.last.kernel[...]), np.asarray(model.positions[...])
            checkpoints.save(0, nnx.state(model))
            checkpoints.wait()
        with on(gtp=5):
            other = make(seed=1)
            state, _ = checkpoints.restore(nnx.state(other))
            nnx.update(other, state)
            same((other.last.kernel[...], other.positions[...]), wanted, 0)


@pytest.mark.full
def test_adapters_beside_padded_weights_train_as_on_one_device(x64):
    found, tokens = [], batches(1)[0]
    for degrees in (dict(gtp=1), dict(gtp=7)):
        with on(**degrees):
            model = gtp.nn.lora(make(), 2, alpha=4.0, targets=("blocks.*.up", "last"), rngs=nnx.Rngs(1))
            state = gtp.TrainState.create(model, OPTIMIZERS["adamw"])
            step = gtp.train_step(loss, OPTIMIZERS["adamw"])
            for _ in range(2):
                state, metrics = step(state, tokens)
            frozen = jax.tree.map(np.asarray, state.logical().frozen)
            found.append((jax.tree.map(np.asarray, state.params), frozen, float(metrics["loss"])))
    assert state.frozen["last"]["base"]["kernel"].shape == (28, 26)
    same(found[1], found[0])


def test_shards_are_whole_blocks_of_the_formats_where_that_adds_little():
    class Wide(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(2230, 30, rngs=rngs), nnx.Linear(30, 1103, rngs=rngs)])
            self.heads = nnx.LinearGeneral(30, (1101, 2), rngs=rngs)
            self.equal = nnx.Linear(1006, 30, rngs=rngs)

    with on(gtp=7):
        model = gtp.init(lambda rngs: gtp.shard(Wide(rngs), "layers.*"), nnx.Rngs(0))
    shapes = [one.kernel.get_raw_value().shape for one in (*model.layers, model.heads, model.equal)]
    assert shapes == [(10 * 7 * 32, 30), (30, 10 * 7 * 16), (30, 10 * 7 * 16, 2), (1008, 30)]


# a recipe, and how much parameters may differ; products of tiles are summed in float32
RECIPES = {
    "FP8": (gtp.FP8(), 1e-12),
    "NVFP4": (gtp.NVFP4(), 1e-12),
    "MXFP8": (gtp.MXFP8(), 1e-12),
    "FP8 matmuls": (gtp.FP8(matmuls=True), 1e-12),
    "MXFP8 matmuls": (gtp.MXFP8(matmuls=True), 1e-12),
    "FP8 in blocks": (gtp.recipes.FP8Blocks(), 1e-6),
}
USUAL = ["NVFP4", "FP8 in blocks", "MXFP8 matmuls", "FP8", "MXFP8", "FP8 matmuls"]


@pytest.mark.full
@pytest.mark.parametrize(("name", "mesh", "view"), pairwise(USUAL, ["gtp 7", "gtp 3, dp 2"], ["global", "local"]))
def test_steps_under_a_recipe_are_those_of_one_device(name, mesh, view, x64):
    recipe, atol = RECIPES[name]
    assert_same_steps("adamw", mesh, recipe=recipe, atol=atol, view=view)


@pytest.mark.full
@pytest.mark.parametrize(("name", "view"), [("NVFP4", "global"), ("FP8 matmuls", "local"), ("FP8 in blocks", "global")])
def test_steps_of_stacked_weights_under_a_recipe_are_those_of_one_device(name, view, x64):
    recipe, atol = RECIPES[name]
    assert_same_steps("adamw", "gtp 7", kind=Stacked, recipe=recipe, atol=atol, view=view)


@pytest.mark.full
@pytest.mark.parametrize("name", USUAL[:3])
def test_where_tp_cuts_blocks_calls_are_those_of_weights_that_are_not_padded(name, x64):
    """On one device, recipes quantize these weights, because nothing cuts their blocks."""
    tokens, found = batches(1)[0], []
    with on(gtp=3, tp=2), gtp.use_recipe(RECIPES[name][0]):
        for pad in (False, True):
            with gtp.layout.even_shares(pad):
                model = make()
            loss = lambda model: jnp.sin(3 * model(tokens)).mean()  # noqa: E731
            value, gradients = nnx.jit(nnx.value_and_grad(loss))(model)
            found.append((np.asarray(value), [np.asarray(v[...]) for _, v in nnx.to_flat_state(gradients)]))
    assert model.last.kernel.get_raw_value().shape == (27, 26)
    same(found[1], found[0], 1e-6 if "blocks" in name else 1e-12)


@pytest.mark.full
@pytest.mark.parametrize(("wire", "view"), pairwise(["fp8", "mxfp8", "bf16"], ["global", "local"]))
def test_exchanged_gradients_are_those_of_gtp_jax_own_layers(wire, view, x64):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(42, 33))
    kernels = [jnp.asarray(rng.normal(size=(33, 33)) / 6) for _ in range(2)]

    def loss(model, x):
        return jnp.sin(3 * model(x)).sum(), jnp.asarray(float(x.size))

    def gradients(own):
        layer = lambda rngs: (gtp.Dense if own else nnx.Linear)(33, 33, use_bias=False, rngs=rngs, **F64)  # noqa: E731
        model = gtp.init(lambda rngs: nnx.Sequential(layer(rngs), jnp.tanh, layer(rngs), jnp.tanh), nnx.Rngs(0))
        for one, kernel in zip(model.layers[::2], kernels, strict=True):
            one.kernel[...] = kernel
        model = model if own else gtp.shard(model, nnx.Linear, min_size=80)
        state = gtp.TrainState.create(model, optax.sgd(1.0))
        options = dict(recipe=gtp.recipes.BF16(grad_wire=wire), view=view)
        made = jax.jit(lambda state, x: gtp.train.loss_and_gradients(loss, state, x, **options)[1])(state, x)
        return [np.asarray(one) for one in jax.tree.leaves(made)]

    with on(gtp=7):
        found, wanted = gradients(own=False), gradients(own=True)
    with on(gtp=1):
        plain = gradients(own=False)
    for one, other, exact in zip(found, wanted, plain, strict=True):
        assert {one.shape, other.shape} <= {(35, 33), (33, 35)} and np.abs(exact).max() > 0.01
        assert np.count_nonzero(one) == np.count_nonzero(one[:33, :33]), "the padding is zero"
        one, other = one[:33, :33], other[:33, :33]
        # a sum that is another in its last bit is rounded to another number, if it lies between two
        assert np.mean(np.abs(one - other) > 1e-12) < 0.01 and np.abs(one - other).max() < 0.1 * np.abs(exact).max()
        assert 0 < np.abs(one - exact).max() < 0.1 * np.abs(exact).max()


@pytest.mark.full
def test_bytes_on_the_wire_and_shards_are_those_of_the_padded_matrix():
    with on(gtp=7):
        model = gtp.shard(nnx.eval_shape(lambda: nnx.Linear(2230, 64, rngs=nnx.Rngs(0))), nnx.Linear)
        (weight,) = sharded_weights(model, gtp.NVFP4())
    layout = weight.coded.layout
    assert layout.shape == (2230, 64) and layout.array_shape == (2240, 64) and layout.shard_shape == (320, 64)
    assert weight.bytes == 2240 * 64 // 2 + 2240 * 64 // 256, "half a byte for each element, and a scale for each block"
