"""With operands in block formats a model is the same on every mesh, in any number of microbatches, and trains."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.models import Llama, LlamaConfig, next_token_loss

from ..chain.programs import lowered_step
from ..parity.plain_llama import loss_and_gradient
from .oracles import dequantized
from .test_recipe_parity import ALIGNED, assert_close, batch_of, host, neighbours_together, scope, start

# Blocks of 32 rows lie within a shard.
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=128,
    dtype="float64",
)
RECIPES = {
    "MXFP8": gtp.MXFP8(matmuls=True),
    "NVFP4": gtp.NVFP4(matmuls=True, stochastic=False),  # random bits go by the place in a rank's own array
    "NVFP4, first in float64, down in MXFP8": gtp.NVFP4(
        matmuls=True, stochastic=False, high_precision_first=1, override={"mlp.down": gtp.MXFP8(matmuls=True)}
    ),
}
SHORT = dataclasses.replace(CONFIG, num_layers=1)


@functools.cache  # for all recipes and numbers of microbatches, which change neither
def start_of(**degrees):
    return start(CONFIG, optax.sgd(1.0))


@functools.cache
def on_one_device(name):
    return gradients(dict(gtp=1), RECIPES[name])


def gradients(degrees, recipe, parts=1):
    batch = batch_of(CONFIG, 8, 32)
    with scope(degrees):
        state = start_of(**degrees)
        run = jax.jit(lambda s, b: gtp.loss_and_gradients(next_token_loss, s, b, microbatches=parts, recipe=recipe))
        loss, found = run(state, neighbours_together(batch, degrees, parts))
        return float(loss), host(found)


def dense_gradients(degrees, recipe, parts, sizes=(96,)):
    """Of a layer with kernels of these sizes in one fused weight, behind another, which sees dgrad."""
    rng = np.random.default_rng(0)
    x, ahead = rng.normal(size=(8, 16, 64)), rng.normal(size=(64, 64))
    kernels = {size: rng.normal(size=(64, size)) for size in sizes}

    class Plain(nnx.Module):
        def __init__(self, rngs):
            options = dict(dtype="float64", param_dtype="float64")
            self.ahead = gtp.Dense(64, 64, kernel_init=lambda *_: ahead, rngs=rngs, **options)
            names = {str(size): size for size in sizes}
            self.dense = gtp.Dense(64, names, kernel_init=lambda _, shape, __: kernels[shape[1]], rngs=rngs, **options)

        def __call__(self, x):
            return self.dense(self.ahead(x))

    def loss(model, batch):
        return sum((y**3).sum() for y in model(batch["x"]).values()), np.float64(batch["x"].shape[0])

    with scope(degrees):
        state = gtp.TrainState.create(gtp.init(Plain, nnx.Rngs(0)), optax.sgd(1.0))
        run = jax.jit(lambda s, b: gtp.loss_and_gradients(loss, s, b, microbatches=parts, recipe=recipe))
        value, found = run(state, neighbours_together({"x": x}, degrees, parts))
        return float(value), host(found)


@pytest.mark.parametrize("name", ["NVFP4", pytest.param("MXFP8", marks=pytest.mark.slow)])
def test_a_dense_layer_has_the_gradients_of_one_device(name, x64):
    loss, wanted = dense_gradients(dict(gtp=1), RECIPES[name], 1)
    there, found = dense_gradients(dict(gtp=2), RECIPES[name], 2)
    assert abs(there - loss) <= 1e-12 * abs(loss)
    assert_close(found, wanted, 1e-11)


@pytest.mark.slow
def test_no_block_of_a_gradient_has_two_kernels_in_it_on_any_mesh(x64):
    recipe, sizes = RECIPES["NVFP4"], (56, 120)  # no multiples of a block: padded where they are sharded
    loss, wanted = dense_gradients(dict(gtp=1), recipe, 1, sizes)
    there, found = dense_gradients(dict(gtp=4), recipe, 1, sizes)
    assert abs(there - loss) <= 1e-12 * abs(loss)
    assert_close(found, wanted, 1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("degrees, parts", [(dict(gtp=4), 1), (dict(gtp=2, tp=2), 2), (dict(gtp=1), 4)])
@pytest.mark.parametrize("name", RECIPES)
def test_loss_and_gradients_are_those_of_one_device_to_the_rounding_of_float64(name, degrees, parts, x64):
    loss, wanted = on_one_device(name)
    there, found = gradients(degrees, RECIPES[name], parts)
    assert abs(there - loss) <= 1e-12 * loss
    # products of float32 values leave float64's rounding, which a code could in principle amplify
    assert_close(found, wanted, 1e-11)


@pytest.mark.slow
def test_the_rounding_of_gradients_follows_from_the_step_and_the_microbatch_alone():
    config, recipe = dataclasses.replace(SHORT, dtype="float32"), gtp.NVFP4(matmuls=True)
    batch = batch_of(config, 8, 16)
    with scope(dict(gtp=2)):
        run = jax.jit(lambda s, b: gtp.loss_and_gradients(next_token_loss, s, b, microbatches=2, recipe=recipe))
        state = start(config, optax.sgd(1.0))
        at = lambda n: dataclasses.replace(state, step=jax.numpy.int32(n))  # noqa: E731
        once, again, later = (host(run(at(n), batch)) for n in (3, 3, 4))
    jax.tree.map(np.testing.assert_array_equal, once, again)
    assert once[0] == later[0]  # the forward pass rounds to nearest
    changed = [
        not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(once[1]), jax.tree.leaves(later[1]), strict=True)
    ]
    assert sum(changed) > len(changed) / 2


class Again(nnx.Module):
    """A module that is called some times on one input: alone, or within the layer of a stack."""

    def __init__(self, rngs, calls, stacked):
        class Layer(gtp.nn.Layer):
            def __init__(self, rngs):
                self.dense, self.sequence_parallel = gtp.Dense(32, 32, dtype="float32", rngs=rngs), False

            def local(self, x):
                return sum(self.dense(x) for _ in range(calls))

        self.inner = gtp.Stack(Layer, 1, rngs=rngs) if stacked else Layer(rngs)

    def __call__(self, x):
        return self.inner(x)


@pytest.mark.parametrize("stacked", [pytest.param(False, marks=pytest.mark.slow), True])
def test_two_calls_of_a_module_are_not_rounded_alike(stacked):
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(2, 32, 32)), "g": rng.normal(size=(2, 32, 32))}
    loss = lambda model, b: ((model(b["x"]) * b["g"]).sum(), np.float32(2))  # noqa: E731  of each call the same gradient

    def gradient(calls, recipe):
        with scope(dict(gtp=1)):
            make = lambda rngs: Again(rngs, calls, stacked)  # noqa: E731
            state = gtp.TrainState.create(gtp.init(make, nnx.Rngs(0)), optax.sgd(1.0))
            run = jax.jit(lambda s, b: gtp.loss_and_gradients(loss, s, b, recipe=recipe)[1])
            jax.tree.map(np.testing.assert_array_equal, host(run(state, batch)), host(run(state, batch)))
            return jax.tree.leaves(host(run(state, batch)))[0]

    to_nearest, stochastic = gtp.NVFP4(matmuls=True, stochastic=False), gtp.NVFP4(matmuls=True)
    np.testing.assert_array_equal(gradient(2, to_nearest), 2 * gradient(1, to_nearest))
    once, twice = gradient(1, stochastic), gradient(2, stochastic)
    differing = np.mean(twice != 2 * once)
    assert differing > 0.9
    assert np.linalg.norm(twice - 2 * once) < 0.5 * np.linalg.norm(twice)


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one_and_no_step_compiles_again():
    config, optimizer = dataclasses.replace(SHORT, dtype="bfloat16"), optax.adam(1e-2)
    batch = batch_of(config, 8, 16)
    with scope(dict(gtp=2)):
        step = gtp.train_step(next_token_loss, optimizer, recipe=gtp.NVFP4(matmuls=True))
        state, compiled = start(config, optimizer), 0
        for number in range(4):
            if number == 2:
                stored = host((state.params, state.opt_state, state.step))
            state, _ = step(state, batch)
            compiled = compiled if number > 1 else step.jitted()._cache_size()
        assert step.jitted()._cache_size() == compiled
        fresh = start(config, optimizer)
        placed = jax.tree.map(
            lambda a, like: jax.device_put(a, like.sharding), stored, (fresh.params, fresh.opt_state, fresh.step)
        )
        resumed = gtp.TrainState(*placed, fresh.model_def)
        for _ in range(2):
            resumed, _ = step(resumed, batch)
    jax.tree.map(np.testing.assert_array_equal, host(resumed.params), host(state.params))


@pytest.mark.slow
@pytest.mark.parametrize("unroll", ["full", 1])
def test_first_and_last_layers_stay_as_they_are(unroll, x64):
    config = dataclasses.replace(ALIGNED, num_layers=4, unroll=unroll, keep_gathered=2 if unroll == 1 else 1)
    recipe, batch = gtp.NVFP4(high_precision_first=1, high_precision_last=1), batch_of(config)
    with scope(dict(gtp=4)):
        state = start(config, optax.sgd(1.0))
        run = jax.jit(lambda s, b: gtp.loss_and_gradients(next_token_loss, s, b, recipe=recipe))
        loss, found = run(state, batch)
        found, params = host(found), host(state.params)
    rounded = dequantized(params, recipe.wire, config.dtype)
    layers = jax.tree.map(
        lambda a, b: np.concatenate([a[:1], b[1:3], a[3:]]), params["blocks"]["layers"], rounded["blocks"]["layers"]
    )
    wanted = loss_and_gradient(config)({**rounded, "blocks": {"layers": layers}}, batch)
    assert abs(float(loss) - float(wanted[0])) <= 1e-12 * float(loss)
    assert_close(found, host(wanted[1]), 1e-12)


@pytest.mark.slow
def test_quantized_operands_move_nothing_more_over_the_mesh(monkeypatch):
    # but for the sequence over tp, which they move at once, as all do here
    monkeypatch.setattr(gtp.Dense, "moves_in_parts", lambda self, x: False)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=128
    )
    moved = []
    for recipe in (gtp.NVFP4(), gtp.NVFP4(matmuls=True)):
        text = lowered_step(config, gtp.make_mesh(gtp=4, tp=2), batch=8, seq=16, recipe=recipe).compile().as_text()
        found = hlo.collectives(text)
        moved.append(sorted((c.kind, c.axes, c.dtype, c.operand_bytes, c.times) for c in found))
    assert moved[0] == moved[1]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [gtp.MXFP8(matmuls=True), gtp.NVFP4(matmuls=True)], ids=lambda r: type(r).__name__)
def test_a_fresh_model_learns_as_fast_as_in_bf16(recipe):
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=256
    )
    rng = np.random.default_rng(0)
    table = rng.dirichlet(np.full(64, 0.05), 64).cumsum(1)  # a language of pairs, to be learned in some steps

    def text():
        rows = [rng.integers(0, 64, 16)]
        for _ in range(32):
            rows.append((rng.random((16, 1)) > table[rows[-1]]).sum(1).clip(0, 63))
        rows = np.stack(rows, 1).astype(np.int32)
        return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}

    batches, losses = [text() for _ in range(60)], []
    for how in (None, recipe):
        with scope(dict(gtp=4)):
            optimizer = optax.adam(3e-3)
            state = gtp.TrainState.create(gtp.init(lambda rngs: Llama(config, rngs=rngs), nnx.Rngs(0)), optimizer)
            step = gtp.train_step(next_token_loss, optimizer, recipe=how)
            found = []
            for batch in batches:
                state, metrics = step(state, batch)
                found.append(float(metrics["loss"]))
        losses.append(found)
    start_loss, plain, quantized = losses[0][0], np.mean(losses[0][-10:]), np.mean(losses[1][-10:])
    assert plain < start_loss - 1.5
    assert quantized - plain < 0.06 * (start_loss - plain)
