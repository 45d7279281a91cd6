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
    """The scaling after some steps, on a mesh of these degrees, and the losses."""
    with scope(**degrees):
        optimizer = optax.sgd(rate)
        state = gtp.TrainState.create(placed(make), optimizer, recipe=recipe)
        state, losses = continued(state, optimizer, range(steps), recipe=recipe, **options)
        return jax.tree.map(np.asarray, state.scaling), losses


def scope(**degrees):
    return jax.set_mesh(gtp.make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))]))


def continued(state, optimizer, numbers, **options):
    step, losses = gtp.train_step(loss, optimizer, **options), []
    for number in numbers:
        state, metrics = step(state, batch(number))
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.fixture(scope="module")
def on_one_device():
    with jax.enable_x64(True):
        return trained({"gtp": 1})


class StockBlock(nnx.Module):
    """A `Block` of Flax's layers, with its kernels."""

    def __init__(self, up, down, rngs):
        options = dict(use_bias=False, dtype=jnp.float64, rngs=rngs)
        split = lambda *names: nnx.with_partitioning(nnx.initializers.zeros, names)  # noqa: E731
        self.up = nnx.Linear(32, 64, kernel_init=split(None, "tp"), **options)
        self.down = nnx.Linear(32, 32, kernel_init=split("tp", None), **options)
        self.up.kernel.set_value(jnp.concatenate([up["a"], up["b"]], -1))
        self.down.kernel.set_value(down)

    def __call__(self, x):
        a, b = jnp.split(self.up(x), 2, -1)
        return x + self.down(a * b)


class Within(nnx.Module):
    """Calls a block that the model around it holds too."""

    def __init__(self, block):
        self.block = block

    def __call__(self, x, times):
        for _ in range(times):
            x = self.block(x)
        return x


class Stock(nnx.Module):
    """A `Model` of Flax's layers, with the same kernels. Some calls of the last block are made by another block."""

    def __init__(self, rngs, again=lambda block, x: block(block(x)), within=0):
        own = Model(rngs)
        kernels = [jax.tree.map(lambda a, i=i: a[i], _kernels(own.blocks.layers)) for i in range(2)]
        self.blocks = nnx.List([StockBlock(*one, rngs) for one in kernels])
        self.twice = StockBlock(*_kernels(own.twice), rngs)
        self.sharing = Within(self.twice) if within else None
        self.again, self.within = again, within

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        if self.sharing is None:
            return self.again(self.twice, x)
        return self.sharing(self.twice(x) if self.within == 1 else x, self.within)


def _kernels(block):
    return {name: kernel[...] for name, kernel in block.up.kernel.items()}, block.down.kernel[...]


def sharded(remat="matmuls", **options):
    return lambda rngs: gtp.shard(Stock(rngs, **options), (StockBlock, Within), min_size=64, remat=remat)


def by_module(trained):
    """Returns the scaling of a `Stock` under the names of a `Model`, and the losses."""
    (scaling, losses), found = trained, {}
    for name in ("up", "down"):
        layers = [scaling[f"blocks.{i}.{name}.kernel"] for i in range(2)]
        found[f"blocks.layers.{name}"] = jax.tree.map(lambda *own: np.stack(own), *layers)
        (path,) = (path for path in scaling if path.endswith(f"{name}.kernel") and not path.startswith("blocks"))
        found[f"twice.{name}"] = scaling[path]
    return found, losses


def assert_same(found, wanted):
    (found, losses), (wanted, wanted_losses) = found, wanted
    np.testing.assert_allclose(losses, wanted_losses[-len(losses) :], rtol=1e-6)
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


@pytest.mark.parametrize("way", others_full(WAYS, ["gtp 2, tp 2", "gradients over dp last"]))
def test_the_history_is_that_of_one_device_bit_for_bit(way, on_one_device, x64):
    degrees, model, options = WAYS[way]
    assert_same(trained(degrees, lambda rngs: Model(rngs, **model), **options), on_one_device)


def mapped(block, x):
    """Two calls for each example."""
    return jax.vmap(lambda x: block(block(x)))(x)


def chosen(block, x):
    """Two calls in a branch."""
    return jax.lax.cond(x[0, 0, 0] < 9, lambda x: block(block(x)), lambda x: x, x)


STOCK = {
    "one device": ({"gtp": 1}, {}, {}),
    "dp 2, gtp 2, tp 2": ({"dp": 2, "gtp": 2, "tp": 2}, {}, {}),
    "more ranks than examples": ({"gtp": 8}, {}, {"microbatches": 2}),
    "gradients over dp last, a block that two blocks share": (
        {"gtp": 2, "dp": 2},
        {"within": 1},
        {"view": "local", "microbatches": 2, "reduce_over_dp": "last"},
    ),
    "two calls within one": ({"gtp": 2}, {"within": 2}, {}),
    "everything recomputed": ({"gtp": 2}, {"remat": "nothing"}, {}),
    "nothing recomputed": ({"gtp": 2, "tp": 2}, {"remat": "everything"}, {}),
    "calls in a loop": ({"gtp": 2}, {"again": looped}, {}),
    "calls through nnx.jit": ({"gtp": 2}, {"again": jitted}, {"microbatches": 2}),
    "calls through nnx.remat": ({"gtp": 2}, {"again": recomputed}, {}),
    "calls for each example": ({"gtp": 2}, {"again": mapped}, {}),
    "calls in a branch": ({"gtp": 2}, {"again": chosen}, {}),
}


USUAL = ["more ranks than examples", "two calls within one", "calls through nnx.remat"]


@pytest.mark.parametrize("way", others_full(STOCK, USUAL))
def test_a_sharded_model_of_stock_layers_has_the_history_and_losses_of_own_layers(way, on_one_device, x64):
    degrees, model, options = STOCK[way]
    assert_same(by_module(trained(degrees, sharded(**model), **options)), on_one_device)


def changed(model, batch):
    """The loss of a copy with larger weights, for smaller inputs, so that products stay what they are."""
    model = nnx.clone(model)
    for _, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.Param):
            variable.set_value(jax.tree.map(lambda w: 4 * w, variable.get_value()))
    return loss(model, {**batch, "x": batch["x"] / 64})


@pytest.mark.parametrize("make", [Model, sharded()], ids=["own layers", "stock"])
def test_weights_that_a_loss_enlarges_are_scaled_by_their_own_amaxes(make, x64):
    def last_loss(recipe):
        with scope(gtp=2):
            optimizer = optax.sgd(0.0)
            state = gtp.TrainState.create(placed(make), optimizer, recipe=recipe)
            step = gtp.train_step(changed, optimizer, recipe=recipe)
            state, _ = step(state, batch(0))
            return float(step(state, batch(0))[1]["loss"])

    wanted = last_loss(gtp.FP8(matmuls=True, exclude=()))
    np.testing.assert_allclose(last_loss(RECIPE), wanted, rtol=0.2)


def test_a_sharded_model_goes_on_on_another_mesh_as_if_never_stopped(on_one_device, tmp_path, x64):
    make, optimizer = sharded(), optax.sgd(1e-4)
    with scope(gtp=2), Checkpoints(tmp_path) as checkpoints:
        state = gtp.TrainState.create(placed(make), optimizer, recipe=RECIPE)
        checkpoints.save(2, continued(state, optimizer, range(2), recipe=RECIPE)[0])
    with scope(dp=2, gtp=2, tp=2), Checkpoints(tmp_path, read_only=True) as checkpoints:
        like = gtp.TrainState.create(gtp.nn.abstract_model(make), optimizer, recipe=RECIPE)
        state, losses = continued(checkpoints.restore(like)[0], optimizer, range(2, STEPS), recipe=RECIPE)
        assert_same(by_module((jax.tree.map(np.asarray, state.scaling), losses)), on_one_device)


def test_layers_in_high_precision_have_no_amaxes_of_activations(x64):
    ends = gtp.recipes.FP8Delayed(history=2, exclude=("twice",), high_precision_first=1)
    found, _ = trained({"gtp": 2}, recipe=ends, steps=1)
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


class StockPair(nnx.Module):
    """A `Pair` of Flax's layers."""

    def __init__(self, rngs):
        self.a, self.b = (nnx.Linear(size, 24, use_bias=False, rngs=rngs) for size in (16, 24))

    def __call__(self, x):
        return self.b(self.b(self.a(x)))


def stock_pair(rngs):
    return gtp.shard(StockPair(rngs), nnx.Linear, min_size=16)


def adapted_pair(rngs):
    return gtp.nn.lora(stock_pair(rngs), 2, 4, rngs=nnx.Rngs(1))


PAIRS = {"own": Pair, "stock": stock_pair}


def start(make=Pair, recipe=RECIPE):
    return gtp.TrainState.create(placed(make), OPTIMIZER, recipe=recipe)


def pair_batch(c=1.0):
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(8, 16)).astype(np.float32), "c": np.full((8, 24), c, np.float32)}


@pytest.mark.parametrize(
    "layers, view", others_full([("own", "global"), ("own", "local"), ("stock", "global")], [("stock", "global")])
)
def test_a_skipped_step_changes_no_scale(layers, view):
    with scope(gtp=2):
        step = gtp.train_step(pair_loss, OPTIMIZER, recipe=RECIPE, view=view)
        state, _ = step(start(PAIRS[layers]), pair_batch())
        before = jax.tree.map(lambda a: np.asarray(jnp.copy(a)), state.scaling)
        state, metrics = step(state, pair_batch(np.nan))
        assert metrics["skipped"]
        state, _ = step(state, pair_batch(2.0), skip=jnp.array(True))
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state.scaling), before)
        state, metrics = step(state, pair_batch(2.0))
        assert not metrics["skipped"]
        for name, own in state.scaling.items():
            assert np.any(np.asarray(own["history"]) != before[name]["history"])


@pytest.mark.parametrize("layers", PAIRS)
def test_ranks_reduce_one_vector_for_weights_and_one_for_inputs_and_gradients(layers):
    with scope(gtp=2, dp=2):
        state, options = start(PAIRS[layers]), {"view": "local", "microbatches": 2}
        text = str(jax.make_jaxpr(gtp.train_step(pair_loss, OPTIMIZER, recipe=RECIPE, **options))(state, pair_batch()))
    assert text.count("pmax[") == 2


@pytest.mark.parametrize("layers", others_full(PAIRS, ["stock"]))
def test_an_evaluation_uses_the_scales_of_the_state(layers):
    with scope(gtp=2):
        state = start(PAIRS[layers])
        evaluate = gtp.eval_step(pair_loss, recipe=RECIPE)
        first = float(evaluate(state, pair_batch())["loss"])
        step = gtp.train_step(pair_loss, OPTIMIZER, recipe=RECIPE)
        _, metrics = step(state, pair_batch())
        assert float(metrics["loss"]) == first
        state = start(PAIRS[layers])
        other = dataclasses.replace(state, scaling=jax.tree.map(lambda a: a * 0 + 0.5, state.scaling))  # saturates
        assert float(evaluate(other, pair_batch())["loss"]) != first


def test_frozen_weights_beneath_adapters_have_amaxes_too():
    def after(make):
        return gtp.train_step(pair_loss, OPTIMIZER, recipe=RECIPE)(start(make), pair_batch())[0]

    with scope(gtp=2):
        wanted, state = after(stock_pair).scaling, after(adapted_pair)  # whose adapters begin as zeros
        assert {"a", "b"} <= state.frozen.keys()
        for name in "ab":
            found = np.asarray(state.scaling[f"{name}.base.kernel"]["history"][:, -1])
            assert np.all(found > 0)
            np.testing.assert_allclose(found, wanted[f"{name}.kernel"]["history"][:, -1], rtol=1e-6)


def test_explain_traces_calls_and_tells_what_sets_the_scales():
    with scope(gtp=2):
        model = gtp.nn.abstract_model(stock_pair)
        found = gtp.explain(model, RECIPE, call=lambda model: model(jnp.ones((8, 16))))
        assert [call.multiplied for call in found.calls] == [("a.kernel",), ("b.kernel",), ("b.kernel",)]
        assert "scaled by the amaxes of earlier steps" in str(gtp.explain(model, RECIPE, path="a.kernel"))


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


class Sliced(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.vmap(lambda rngs: nnx.Linear(16, 16, rngs=rngs))(rngs.split(3))

    def __call__(self, x):
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


def sliced(rngs):
    return gtp.shard(Sliced(rngs), nnx.Linear, min_size=16)


def stepped_stock(make=stock_pair, loss=pair_loss, view="global", **degrees):
    with scope(**degrees):
        gtp.train_step(loss, OPTIMIZER, recipe=RECIPE, view=view).lower(start(make), pair_batch())


def of_another_model():
    with scope(gtp=2):
        other = start(stock_pair).model()
    stepped_stock(loss=lambda model, batch: pair_loss(other, batch), gtp=2)


def stepped(state_recipe, recipe):
    with scope(gtp=1):
        gtp.train_step(pair_loss, OPTIMIZER, recipe=recipe)(start(recipe=state_recipe), pair_batch())


def taken(function, *args, **options):
    with scope(gtp=1):
        return function(pair_loss, start(), pair_batch(), *args, **options)


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
    "slices of a stacked weight": (
        lambda: stepped_stock(sliced, gtp=2),
        "layers.kernel slice `gtp_jax.Stack` `gtp_jax.FP8(matmuls=True)`",
    ),
    "stock layers that ranks compute twice": (
        lambda: stepped_stock(view="local", gtp=2, tp=2),
        "a.kernel 2 ranks `view='global'` `gtp_jax.FP8(matmuls=True)`",
    ),
    "a model without a state": (of_another_model, "a.kernel `gtp_jax.hook.without_hook()`"),
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
