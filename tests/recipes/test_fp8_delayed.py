"""`FP8Delayed`: amaxes are maxima over calls, microbatches and ranks, and a step scales by those of earlier ones."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming
from placed import placed
from selection import others_full, pairwise

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.formats import FP8_E4M3 as E4M3
from gtp_jax.formats import FP8_E5M2 as E5M2
from gtp_jax.formats import DelayedScaling
from gtp_jax.train._scaling import next_amaxes

RECIPE = gtp.recipes.FP8Delayed(history=3, exclude=())
STEPS = 3
OPTIMIZER = optax.adam(1e-3)


class Block(nnx.Module):
    def __init__(self, rngs, **options):
        options = {"dtype": "float64", "kernel_init": nnx.initializers.normal(0.1), "rngs": rngs, **options}
        self.up = gtp.Dense(32, {"a": 32, "b": 32}, parallel="column", **options)
        self.down = gtp.Dense(32, 32, parallel="row", **options)

    def __call__(self, x):
        parts = self.up(x)
        return x + self.down(parts["a"] * parts["b"])


class Model(nnx.Module):
    """A stack, and a block that is called twice. In float64, sums of products of FP8 numbers are exact in any order."""

    def __init__(self, rngs, remat="matmuls", again=lambda block, x: block(block(x)), **options):
        self.blocks = gtp.Stack(functools.partial(Block, **options), 2, remat=remat, rngs=rngs)
        self.twice = Block(rngs, **options)
        self.again = again

    def __call__(self, x):
        return self.again(self.twice, self.blocks(x))


def loss(model, batch):
    y = model(batch["x"])
    return jnp.sum(y * y * batch["c"]), jnp.float32(y.size)


def batch(number):
    """Rows of growing sizes, so that each microbatch and rank has other amaxes, and the largest come last or first."""
    rng, sizes = np.random.default_rng(number), np.linspace(0.5, 2, 8)[:: 1 if number % 2 else -1]
    return {
        "x": jnp.asarray(rng.normal(size=(8, 4, 32)) * sizes[:, None, None]),
        "c": jnp.asarray(rng.normal(size=(8, 4, 1))),
    }


def trained(degrees, make=Model, *, recipe=RECIPE, rate=1e-4, steps=STEPS, **options):
    """The scaling after some steps, on a mesh of these degrees."""
    count = int(np.prod(list(degrees.values())))
    with jax.set_mesh(gtp.make_mesh(**degrees, devices=jax.devices()[:count])):
        optimizer = optax.sgd(rate)
        state = gtp.TrainState.create(placed(make), optimizer, recipe=recipe)
        step = gtp.train_step(loss, optimizer, recipe=recipe, **options)
        for number in range(steps):
            state, _ = step(state, batch(number))
        return jax.tree.map(np.asarray, state.scaling)


@pytest.fixture(scope="module")
def on_one_device():
    with jax.enable_x64(True):
        return trained({"gtp": 1})


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, own in wanted.items():
        assert np.all(own["history"][..., 1:] > 0), name
        np.testing.assert_array_equal(found[name]["history"], own["history"], err_msg=name)
        np.testing.assert_array_equal(found[name]["amax"], own["amax"], err_msg=name)


def looped(block, x):
    """Two calls as iterations of a loop."""
    graph, state = nnx.split(block)
    return jax.lax.scan(lambda x, _: (nnx.merge(graph, state)(x), None), x, None, length=2)[0]


def recomputed(block, x):
    """Two calls through `nnx.remat`, which splits and merges the block."""
    return nnx.remat(lambda block, x: block(block(x)))(block, x)


def jitted(block, x):
    """Two calls of a function that is compiled on its own."""
    call = nnx.jit(lambda block, x: block(x))
    return call(block, call(block, x))


WAYS = {
    "gtp 2, dp 2, in local view": ({"dp": 2, "gtp": 2}, {}, {"view": "local"}),
    "gtp 2, tp 2": ({"gtp": 2, "tp": 2}, {}, {}),
    "tp 2, each rank with all of a sequence": ({"gtp": 2, "tp": 2}, {"sequence_parallel": False}, {}),
    "gradients over dp last": ({"gtp": 2, "dp": 2}, {}, {"view": "local", "microbatches": 2, "reduce_over_dp": "last"}),
    "codes gathered before the step": ({"gtp": 2}, {}, {"microbatches": 2, "pregathered_layers": "all"}),
    "everything recomputed": ({"gtp": 1}, {"remat": "nothing"}, {}),
    "nothing recomputed": ({"gtp": 2}, {"remat": "everything"}, {}),
    "calls in a loop": ({"gtp": 2}, {"again": looped}, {}),
    "calls through nnx.jit": ({"gtp": 2}, {"again": jitted}, {"microbatches": 2}),
    "calls through nnx.remat": ({"gtp": 2}, {"again": recomputed}, {}),
}


@pytest.mark.parametrize("way", others_full(WAYS, ["gtp 2, tp 2", "gradients over dp last", "calls in a loop"]))
def test_the_history_is_that_of_one_device_bit_for_bit(way, on_one_device, x64):
    degrees, model, options = WAYS[way]
    assert_same(trained(degrees, lambda rngs: Model(rngs, **model), **options), on_one_device)


def test_layers_in_high_precision_have_no_amaxes_of_activations(x64):
    ends = gtp.recipes.FP8Delayed(history=2, exclude=("twice",), high_precision_first=1)
    found = trained({"gtp": 2}, recipe=ends, steps=1)
    assert found.keys() == {"blocks.layers.up", "blocks.layers.down"}
    for own in found.values():
        np.testing.assert_array_equal(own["history"][..., -1] > 0, [[False, True, False], [True, True, True]])
        np.testing.assert_array_equal(own["amax"][0][::2], LARGEST[::2])


# The largest numbers of the formats of input, weight and gradient.
LARGEST = np.array([448, 448, 57344], np.float32)


class Oracle:
    """The rule of TransformerEngine, in numpy: histories and scales of one module."""

    def __init__(self, steps, algorithm="max", margin=0):
        self.history, self.scale = np.zeros((3, steps), np.float32), np.ones(3, np.float32)
        self.algorithm, self.margin = algorithm, margin

    def step(self, amaxes):
        self.history[:, 0] = amaxes
        with np.errstate(all="ignore"):
            top = self.history.max(1) if self.algorithm == "max" else self.history[:, 0]
            scale = LARGEST * np.float32(2) ** -self.margin / top
        scale = np.where(np.isinf(scale), np.finfo(np.float32).max, scale)
        self.scale = np.where((top > 0) & np.isfinite(top), scale, self.scale)
        self.history = np.roll(self.history, -1, axis=1)
        self.history[:, 0] = 0


@pytest.mark.parametrize("steps, algorithm, margin", pairwise([5, 2, 1], ["max", "most_recent"], [0, 2], usual=2))
def test_scales_follow_from_histories_as_in_the_rule(steps, algorithm, margin):
    rng, wanted = np.random.default_rng(0), Oracle(steps, algorithm, margin)
    history, amax = jnp.zeros((3, steps)), jnp.asarray(LARGEST)
    delayed = DelayedScaling(history=steps, algorithm=algorithm, margin=margin)
    extremes = [0, np.inf, np.nan, 1e-37, 1e37]
    for number in range(30):
        now = (10 ** rng.uniform(-6, 6, 3)).astype(np.float32)
        now[number % 3] = extremes[number % 5] if number % 2 else now[number % 3]
        history, amax = jax.jit(next_amaxes, static_argnums=3)(history, amax, now, delayed, LARGEST)
        wanted.step(now)
        np.testing.assert_array_equal(np.asarray(history), wanted.history)
        found = np.minimum(LARGEST / np.asarray(amax, np.float64), np.finfo(np.float32).max)
        np.testing.assert_allclose(found, wanted.scale, rtol=2**-23)


class Pair(nnx.Module):
    """Two dense layers, of which the second is called twice."""

    def __init__(self, rngs):
        self.a = gtp.Dense(16, 24, dtype="float32", rngs=rngs)
        self.b = gtp.Dense(24, 24, dtype="float32", rngs=rngs)

    def __call__(self, x):
        return self.b(self.b(self.a(x)))


def pair_loss(model, batch):
    return jnp.sum(model(batch["x"]) * batch["c"]), jnp.float32(1)


def rounded(x, form, scale):
    """Values in FP8 and back with a scale, saturated."""
    largest = float(form.largest)
    numbers = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[form.element]
    codes = np.clip(x.astype(np.float32) * scale, -largest, largest).astype(numbers)
    return codes.astype(np.float64) / scale


def test_each_step_scales_by_the_amaxes_of_the_steps_before_it_and_records_its_own():
    rng, rate = np.random.default_rng(0), 0.01
    recipe = gtp.recipes.FP8Delayed(history=2, exclude=())
    with jax.set_mesh(gtp.make_mesh(gtp=1, devices=jax.devices()[:1])):
        optimizer = optax.sgd(rate)
        state = gtp.TrainState.create(placed(Pair), optimizer, recipe=recipe)
        step = gtp.train_step(pair_loss, optimizer, recipe=recipe)
        kernels = {name: np.asarray(state.params[name]["kernel"]) for name in "ab"}
        oracles = {name: Oracle(2) for name in "ab"}
        for number in range(4):
            x, c = (rng.normal(size=(8, n)).astype(np.float32) * 3**number for n in (16, 24))
            state, metrics = step(state, {"x": x, "c": c})
            (ax, aw, _), (bx, bw, bg) = oracles["a"].scale, oracles["b"].scale
            w = {name: rounded(kernels[name], E4M3, scale) for name, scale in (("a", aw), ("b", bw))}
            h = rounded(x, E4M3, ax) @ w["a"]
            again = rounded(h, E4M3, bx) @ w["b"]
            y = rounded(again, E4M3, bx) @ w["b"]
            to_again = rounded(c, E5M2, bg) @ w["b"].T
            to_h = rounded(to_again, E5M2, bg) @ w["b"].T
            np.testing.assert_allclose(float(metrics["loss"]), np.sum(y * c), rtol=1e-4)
            tops = [[np.abs(one).max() for one in own] for own in ((x, h, again), (to_h, c, to_again))]
            oracles["a"].step([tops[0][0], np.abs(kernels["a"]).max(), tops[1][0]])
            oracles["b"].step([max(tops[0][1:]), np.abs(kernels["b"]).max(), max(tops[1][1:])])
            for name, wanted in oracles.items():
                own = jax.tree.map(np.asarray, state.scaling[name])
                np.testing.assert_allclose(own["history"], wanted.history, rtol=1e-5, err_msg=f"{name} {number}")
                np.testing.assert_allclose(LARGEST / own["amax"], wanted.scale, rtol=1e-5)
            kernels = {name: np.asarray(jnp.copy(state.params[name]["kernel"])) for name in "ab"}


def start(make=Pair, recipe=RECIPE):
    return gtp.TrainState.create(placed(make), OPTIMIZER, recipe=recipe)


def pair_batch(c=1.0):
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(8, 16)).astype(np.float32), "c": np.full((8, 24), c, np.float32)}


def scope(**degrees):
    return jax.set_mesh(gtp.make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))]))


@pytest.mark.parametrize("view", others_full(["global", "local"], ["global"]))
def test_a_skipped_step_changes_no_scale(view):
    with scope(gtp=2):
        step = gtp.train_step(pair_loss, OPTIMIZER, recipe=RECIPE, view=view)
        state, _ = step(start(), pair_batch())
        before = jax.tree.map(lambda a: np.asarray(jnp.copy(a)), state.scaling)
        state, metrics = step(state, pair_batch(np.nan))
        assert metrics["skipped"]
        state, _ = step(state, pair_batch(2.0), skip=jnp.array(True))
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state.scaling), before)
        state, metrics = step(state, pair_batch(2.0))
        assert not metrics["skipped"]
        assert np.any(np.asarray(state.scaling["a"]["history"]) != before["a"]["history"])


def test_ranks_reduce_one_vector_for_weights_and_one_for_inputs_and_gradients():
    with scope(gtp=2, dp=2):
        state, options = start(), {"view": "local", "microbatches": 2}
        text = str(jax.make_jaxpr(gtp.train_step(pair_loss, OPTIMIZER, recipe=RECIPE, **options))(state, pair_batch()))
    assert text.count("pmax[") == 2


def test_an_evaluation_uses_the_scales_of_the_state():
    with scope(gtp=2):
        state = start()
        evaluate = gtp.eval_step(pair_loss, recipe=RECIPE)
        first = float(evaluate(state, pair_batch())["loss"])
        step = gtp.train_step(pair_loss, OPTIMIZER, recipe=RECIPE)
        _, metrics = step(state, pair_batch())
        assert float(metrics["loss"]) == first
        other = jax.tree.map(lambda a: a * 0 + 0.5, start().scaling)  # saturates
        assert float(evaluate(dataclasses.replace(start(), scaling=other), pair_batch())["loss"]) != first


def test_histories_are_no_parameters_and_every_device_has_them():
    with scope(gtp=2, dp=2):
        with_scaling, without = start(), start(recipe=None)
        shapes = lambda state: jax.tree.map(jnp.shape, (state.params, state.opt_state))  # noqa: E731
        assert shapes(with_scaling) == shapes(without) and without.scaling == {}
        assert {name: own["history"].shape for name, own in with_scaling.scaling.items()} == {"a": (3, 3), "b": (3, 3)}
        assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(with_scaling.scaling))
        np.testing.assert_array_equal(np.asarray(with_scaling.scaling["a"]["amax"]), LARGEST)  # scales of 1


def test_a_checkpoint_restores_scales_bit_for_bit_on_another_mesh(tmp_path):
    with scope(gtp=2):
        step = gtp.train_step(pair_loss, OPTIMIZER, recipe=RECIPE)
        state, _ = step(start(), pair_batch())
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, state)
        wanted = jax.tree.map(np.asarray, state.scaling)
        model = gtp.nn.abstract_model(Pair)
        other = gtp.TrainState.create(model, OPTIMIZER, recipe=gtp.recipes.FP8Delayed(history=7, exclude=()))
        none = gtp.TrainState.create(model, OPTIMIZER)
        with Checkpoints(tmp_path, read_only=True) as checkpoints:
            with pytest.raises(ValueError, match=naming("scaling/a/history float32[3,3] float32[3,7]")):
                checkpoints.restore(other)
            with pytest.raises(ValueError, match=naming("scaling/a/amax float32[3] no such")):
                checkpoints.restore(none)
    with scope(dp=2, gtp=2):
        like = gtp.TrainState.create(gtp.nn.abstract_model(Pair), OPTIMIZER, recipe=RECIPE)
        with Checkpoints(tmp_path, read_only=True) as checkpoints:
            found = checkpoints.restore(like)[0]
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, found.scaling), wanted)


@nnx.split_rngs(splits=3)
@nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
def stacked_by_hand(rngs):
    return gtp.Dense(16, 16, rngs=rngs)


def create(make, recipe=RECIPE, **degrees):
    with scope(**degrees):
        return start(make, recipe)


def stepped(state_recipe, recipe):
    with scope(gtp=1):
        gtp.train_step(pair_loss, OPTIMIZER, recipe=recipe)(start(recipe=state_recipe), pair_batch())


def taken(function, *args, **options):
    with scope(gtp=1):
        return function(pair_loss, start(), pair_batch(), *args, **options)


def sharded():
    with scope(gtp=2):
        gtp.explain(gtp.shard(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), blocks=nnx.Linear, min_size=1), RECIPE)


LONGER = gtp.recipes.FP8Delayed(history=8, exclude=())
REFUSED = {
    "another algorithm": (lambda: gtp.recipes.FP8Delayed(algorithm="mean"), "`algorithm` 'mean' 'max' 'most_recent'"),
    "experts": (
        lambda: create(lambda rngs: nnx.Dict(moe=gtp.nn.MoE(16, 16, num_experts=4, rngs=rngs)), gtp=2),
        "moe. experts `exclude`",
    ),
    "a layer that tp does not divide": (
        lambda: create(lambda rngs: nnx.Dict(router=gtp.Dense(16, 16, rngs=rngs)), gtp=2, tp=2),
        "tp = 2 router `exclude` `parallel='column'`",
    ),
    "layers stacked by hand": (
        lambda: create(lambda rngs: nnx.Dict(layers=stacked_by_hand(rngs)), gtp=2),
        "(3, 16, 16) Stack `gtp_jax.FP8",
    ),
    "a state made without the recipe": (lambda: stepped(None, RECIPE), "a 3 `state.scaling` recipe=recipe"),
    "a state with another history": (lambda: stepped(LONGER, RECIPE), "a 3 `state.scaling` 8 steps"),
    "a recipe in scope": (
        lambda: gtp.use_recipe(gtp.FP8(override={"a": gtp.recipes.FP8Delayed()})),
        "FP8Delayed `use_recipe` Pass",
    ),
    "gradients alone": (lambda: taken(gtp.train.loss_and_gradients, recipe=RECIPE), "`loss_and_gradients` amaxes"),
    "frozen weights": (
        lambda: create(lambda rngs: gtp.nn.freeze(Pair(rngs), RECIPE, trained=nnx.PathContains("b")), gtp=1),
        "a frozen `gtp_jax.FP8",
    ),
    "a sharded model": (sharded, "`gtp_jax.FP8(matmuls=True)`"),
    "replicas": (
        lambda: gtp.train_step(pair_loss, OPTIMIZER, recipe=RECIPE, view="local", replicas=object()),
        "FP8Delayed `replicas`",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_scaled_by_earlier_steps_is_refused_by_name(case):
    make, message = REFUSED[case]
    with pytest.raises(ValueError, match=naming(message)):
        make()
