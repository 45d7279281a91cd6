"""The wire format of `examples/07_wire_of_your_own.py`, E4M3 with one scale per row: errors, meshes, bytes sent."""

import dataclasses
import importlib
from collections import Counter

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from placed import placed
from selection import others_full, pairwise

import gtp_jax as gtp
from gtp_jax import hlo

from .test_recipe_parity import scope

RowFP8 = importlib.import_module("examples.07_wire_of_your_own").RowFP8

LAYERS, WIDTH, HIDDEN = 3, 64, 128


def by_rows(kernel):
    """A kernel `(..., in, out)` rounded as the format says, by numpy."""
    kernel = np.asarray(kernel, np.float32)
    scale = np.abs(kernel).max(-2, keepdims=True) / np.float32(448)
    return (kernel / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


# rows divided over gtp; then over dp too; over tp, which divides rows or columns; unevenly; columns over gtp and dp
PLACES = {
    "gtp 4": (dict(gtp=4), {}, 64),
    "gtp 2 x dp 2": (dict(gtp=2, dp=2), {}, 64),
    "gtp 2 x dp 2, column": (dict(gtp=2, dp=2, tp=2), dict(parallel="column"), 64),
    "gtp 2 x dp 2, row": (dict(gtp=2, dp=2, tp=2), dict(parallel="row"), 64),
    "gtp 2 x tp 3, uneven": (dict(gtp=2, tp=3), dict(parallel="column"), 64),
    "gtp 4 x dp 2, columns": (dict(gtp=4, dp=2), {}, 7),
    "one device": (dict(gtp=1), {}, 64),
}


@pytest.mark.parametrize("place, several", pairwise(PLACES, [True, False], usual=3))
def test_a_gathered_weight_is_near_its_master(place, several):
    degrees, options, out = PLACES[place]
    sizes = {"a": out, "b": 2 * out} if several else out
    rng = np.random.default_rng(0)

    def init(key, shape, dtype):
        spread = rng.normal(size=shape) * np.geomspace(1e-3, 1e3, shape[1])  # rows of unequal magnitude
        spread[:, 3] = 0
        return jnp.asarray(spread, dtype)

    with scope(degrees):
        layer = placed(lambda rngs: gtp.Dense(WIDTH, sizes, dtype="float32", kernel_init=init, rngs=rngs, **options))
        masters = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(layer))["kernel"])
        with gtp.use_recipe(RowFP8()):
            x = jnp.repeat(jnp.eye(WIDTH)[:, None], 6, axis=1)  # a sequence that tp divides
            found = jax.jit(lambda x: layer(x))(x)
    masters, found = (jax.tree.leaves(tree) for tree in (masters, found))
    for master, weight in zip(masters, found, strict=True):
        weight = np.asarray(weight)[:, 0]
        largest = np.abs(master).max(0)
        assert np.all(np.abs(weight - master) <= 2**-4 * largest)
        assert np.mean(weight != master) > 0.5
        rounded = by_rows(np.where(largest, master, 1)) * (largest > 0)
        # but for scales' last bits, and quotients that these put on the other side of a tie
        assert np.mean(~np.isclose(weight, rounded, rtol=1e-6, atol=0)) < 0.01


class Model(nnx.Module):
    """A stack, of several kernels that travel together and of tp's both ways, and a module outside of it."""

    def __init__(self, rngs, hidden=HIDDEN):
        self.blocks = gtp.Stack(lambda rngs: gtp.MLP(WIDTH, hidden, dtype="float32", rngs=rngs), LAYERS, rngs=rngs)
        self.last = gtp.Dense(WIDTH, {"a": 32, "b": 64}, dtype="float32", rngs=rngs)

    def __call__(self, x):
        found = self.last(self.blocks(x))
        return jnp.concatenate([found["a"], found["b"]], -1)


def loss(model, batch):
    errors = jnp.mean((model(batch["x"]) - batch["y"]) ** 2, -1)
    return errors.sum(), jnp.float32(errors.size)


def batch():
    rng = np.random.default_rng(1)
    return {
        "x": rng.normal(size=(8, 4, WIDTH)).astype(np.float32),
        "y": rng.normal(size=(8, 4, 96)).astype(np.float32),
    }


def trained(degrees, recipe=None, hidden=96, **options):  # of which tp leaves so few rows that gtp divides columns
    """Losses of three steps, and the parameters before and after the first."""
    with scope(degrees):
        optimizer = optax.sgd(0.1)
        state = gtp.TrainState.create(placed(lambda rngs: Model(rngs, hidden)), optimizer)
        params, losses = [jax.tree.map(np.asarray, state.params)], []
        step = gtp.train_step(loss, optimizer, recipe=recipe, **options)
        for _ in range(3):
            state, metrics = step(state, batch())
            losses.append(float(metrics["loss"]))
            params.append(jax.tree.map(np.asarray, state.params))
        return losses, *params[:2]


@pytest.fixture(scope="module")
def at_gtp_4():
    return trained(dict(gtp=4), RowFP8())


OTHERS = [
    (dict(gtp=2, dp=2, tp=2), {}),
    (dict(gtp=2, dp=2), dict(microbatches=2)),
    (dict(gtp=2, dp=2), dict(view="local")),
    (dict(gtp=1), {}),
]


@pytest.mark.parametrize("degrees, options", others_full(OTHERS, OTHERS[:1]), ids=str)
def test_a_step_is_the_same_on_every_mesh(at_gtp_4, degrees, options):
    losses, before, after = at_gtp_4
    found, found_before, found_after = trained(degrees, RowFP8(), **options)
    jax.tree.map(np.testing.assert_array_equal, found_before, before)
    np.testing.assert_allclose(found[0], losses[0], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found_after, after)
    # later, masters that differ in their last bits may be rounded to other codes
    np.testing.assert_allclose(found, losses, rtol=1e-4)


def test_a_step_multiplies_rounded_weights_and_its_gradient_goes_straight_to_the_masters(at_gtp_4):
    losses, before, after = at_gtp_4
    rounded = jax.tree_util.tree_map_with_path(lambda path, x: by_rows(x) if "kernel" in str(path) else x, before)
    with scope(dict(gtp=1)):
        state = gtp.TrainState.create(placed(lambda rngs: Model(rngs, 96)), optax.sgd(0.1))
        run = jax.jit(lambda params: gtp.loss_and_gradients(loss, dataclasses.replace(state, params=params), batch()))
        value, gradient = run(rounded)
        unrounded, _ = run(before)
    np.testing.assert_allclose(losses[0], value, rtol=1e-6)
    assert abs(float(unrounded) - losses[0]) > 1e-5 * losses[0]
    jax.tree.map(lambda a, b, g: np.testing.assert_allclose(a, b - 0.1 * g, atol=1e-6), after, before, gradient)
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize(
    "degrees", others_full([dict(gtp=4), dict(gtp=2, dp=2), dict(gtp=2, dp=2, tp=2)], [dict(gtp=2, dp=2)]), ids=str
)
def test_a_weight_travels_as_bytes_in_forward_and_backward(degrees):
    with scope(degrees):
        optimizer = optax.sgd(0.1)
        model = placed(Model)
        told = {fact.module: fact.bytes for fact in gtp.explain(model, RowFP8()).facts}
        state = gtp.TrainState.create(model, optimizer)
        text = gtp.train_step(loss, optimizer, recipe=RowFP8()).lower(state, batch()).compile().as_text()
    found = hlo.collectives(text)
    ranks, tp = degrees["gtp"], degrees.get("tp", 1)
    # rows of a rank, with a scale each
    up, last = (rows // ranks * (WIDTH + 4) for rows in (2 * HIDDEN // tp, 96))
    down = WIDTH // ranks * (HIDDEN // tp + 4)
    layer, shards = up + down, ranks * tp
    assert told == {"blocks.layers.up": shards * up, "blocks.layers.down": shards * down, "last": ranks * last}

    gathers = [c for c in found if c.kind == "all-gather" and c.axes == ("gtp",)]
    times = Counter()
    for c in gathers:
        assert c.exact and c.dtype == "u8" and c.result_bytes == ranks * c.operand_bytes
        times[c.direction, c.operand_bytes] += c.times
    # all of a layer in one gather a pass; the last layer of a stack is kept for backward
    assert times == {
        ("forward", layer): LAYERS,
        ("backward", layer): LAYERS - 1,
        ("forward", last): 1,
        ("backward", last): 1,
    }
    # shards are joined over dp once, as codes; what else moves of a weight is scales, and one amax a row
    joined = [c for c in found if c.kind == "all-gather" and c.axes == ("dp",)]
    elements = (LAYERS * 3 * WIDTH * HIDDEN // tp + WIDTH * 96) // ranks if "dp" in degrees else 0
    assert sum(c.result_bytes * c.times for c in joined if c.dtype == "u8") == elements
    assert sum(c.result_bytes * c.times for c in joined if c.dtype != "u8") <= elements / 8
    maxima = [c for c in found if c.kind == "all-reduce" and "pmax" in c.op_name]
    assert bool(maxima) == ("dp" in degrees) and sum(c.operand_bytes * c.times for c in maxima) <= elements / 8
