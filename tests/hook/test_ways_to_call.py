"""However a model calls its blocks, its loss, gradients and steps are those of the model without a mesh."""

import dataclasses
import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from selection import others_full

import gtp_jax as gtp
from gtp_jax import hlo, hook

from .models import DEPTH, F64, GPT2, WAYS, WIDTH, WITHOUT_DROPOUT, Block, Brief, Few, mean_of, tokens
from .steps import MESHES, PLAIN, assert_equal, scope, together, train


@functools.cache
def drawn(dropout, depth, block):
    return nnx.jit(lambda: GPT2(nnx.Rngs(0, dropout=1), dropout=dropout, depth=depth, block=block))()


def make(way):
    """Returns a model without a mesh, whose arrays are drawn once for all ways; "plain" has blocks with attention."""
    depth, block = (2, Block) if way == "plain" else (DEPTH, Brief)
    return nnx.clone(drawn(0.0 if way in WITHOUT_DROPOUT else 0.1, depth, block))


@functools.cache
def optimizer_of(way):
    return optax.adamw(1e-2, eps=1e-3) if way == "plain" else PLAIN


@functools.cache
def without_mesh(way):
    return train(make(way), mean_of(way), tokens(), optimizer=optimizer_of(way))


USUAL = ["plain", "any order", "nnx.remat"]


@pytest.mark.parametrize("way", others_full(WAYS, USUAL))
def test_three_steps_are_those_without_a_mesh(way, x64):
    stay = way != "plain"  # with "plain", later steps start from the compiler's shardings
    model = make(way)
    with scope(list(MESHES.values())[list(WAYS).index(way) % 2]):
        model = gtp.shard(model, "blocks.*", min_size=64)
        found = train(model, mean_of(way), tokens(), optimizer=optimizer_of(way), stay=stay)
    assert_equal(found, without_mesh(way))


@pytest.mark.parametrize("remat", others_full(["nothing", "everything"], ["nothing"]))
def test_remat_changes_no_number(remat, x64):
    loss = lambda model, tokens: jnp.sin(model(tokens)).mean()  # noqa: E731
    assert_equal(*together(Few, loss, tokens(), MESHES["gtp 8"], remat=remat))


def test_blocks_called_by_the_loss_itself_are_right(x64):
    def loss(model, tokens):
        x = model.embed(tokens)
        for block in (*model.blocks, *model.blocks[::-1]):
            x = jnp.tanh(block(x))
        return (x**2).mean()

    assert_equal(*together(Few, loss, tokens(), MESHES["gtp 8"], blocks="blocks.*"))


def test_second_derivatives_are_those_without_a_mesh(x64):
    def penalty(model, tokens):
        graph, state = nnx.split(model)
        gradients = jax.grad(lambda state: jnp.sin(nnx.merge(graph, state)(tokens)).mean())(state)
        return sum((g**2).sum() for g in jax.tree.leaves(gradients))

    assert_equal(*together(Few, penalty, tokens(), MESHES["gtp 8"], steps=2, blocks="blocks.*"), 1e-9)


class Decoding(nnx.Module):
    """Attends to a memory, which all blocks share."""

    def __init__(self, rngs):
        self.memory = nnx.Linear(WIDTH, WIDTH, rngs=rngs, **F64)

    def __call__(self, x, memory):
        scores = jax.nn.softmax(jnp.einsum("bsd,btd->bst", x, memory))
        return x + jnp.einsum("bst,btd->bsd", scores, self.memory(memory))


class EncoderDecoder(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0, dropout=1)
        self.encoder = nnx.List([Brief(rngs, 0.1) for _ in range(2)])
        self.decoder = nnx.List([Decoding(rngs) for _ in range(2)])

    def __call__(self, x):
        memory, y = x, x[:, ::-1]
        for block in self.encoder:
            memory = block(memory)
        for block in self.decoder:
            y = block(y, memory)
        return y


def test_an_encoder_and_a_decoder_train_as_without_a_mesh(x64):
    loss = lambda model, x: jnp.sin(3 * model(x)).mean()  # noqa: E731
    x = np.random.default_rng(0).normal(size=(16, 6, WIDTH))
    assert_equal(*together(EncoderDecoder, loss, x, MESHES["dp 2, gtp 4"], steps=2))


class Hidden(nnx.Module):
    def __init__(self):
        self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(i), **F64) for i in range(4)])

    def __call__(self, x):
        hidden = []
        for block in self.blocks:
            x = x + jnp.tanh(block(x))
            hidden.append(x)
        return hidden


def test_a_loss_of_the_outputs_of_several_blocks_has_the_gradients_of_one_device(x64):
    def loss(model, x):
        hidden = model(x)
        return jnp.sin(3 * hidden[-1]).mean() + (hidden[1] ** 2).mean()

    x = np.random.default_rng(0).normal(size=(8, WIDTH))
    assert_equal(*together(Hidden, loss, x, MESHES["gtp 8"], blocks="blocks.*"))


@dataclasses.dataclass
class Output:
    """What JAX does not take apart."""

    hidden: jax.Array
    title: str = "hidden"


class Titled(nnx.Sequential):
    def __call__(self, x):
        return Output(super().__call__(x))


def test_a_model_may_return_a_dataclass_that_jax_does_not_know(x64):
    x = np.random.default_rng(0).normal(size=(8, WIDTH))
    make = lambda: Titled(*[nnx.Linear(WIDTH, WIDTH, **F64, rngs=nnx.Rngs(i)) for i in range(2)])  # noqa: E731
    with scope(MESHES["gtp 8"]):
        model = gtp.shard(make(), nnx.Linear, min_size=64)
        found = nnx.jit(lambda model, x: {model(x).title: model(x).hidden})(model, x)
    np.testing.assert_allclose(found["hidden"], make()(x).hidden, rtol=1e-12)


class Filling(nnx.Sequential):
    """Fills a list and a dict that it is given, and draws from the stream of another module."""

    def __call__(self, x, hidden, facts, between):
        for layer in self.layers:
            x = between(layer(x))
            hidden.append(x)
        facts["mean"] = x.mean()
        return x


@pytest.mark.parametrize("examples", others_full([8, 6], [6]))
def test_a_model_may_fill_lists_and_dicts_and_write_variables_of_other_modules(examples, x64):
    def loss(model, dropout, x):
        hidden, facts = [], {}
        model(x, hidden, facts, lambda x: dropout(x))
        return sum(jnp.sin(one).mean() for one in hidden) + facts["mean"]

    x = np.random.default_rng(0).normal(size=(examples, WIDTH))
    make = lambda: Filling(*[nnx.Linear(WIDTH, WIDTH, **F64, rngs=nnx.Rngs(i)) for i in range(3)])  # noqa: E731
    gradient = nnx.jit(nnx.value_and_grad(loss))
    drop = lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(5))  # noqa: E731
    wanted = gradient(make(), drop(), x)
    with scope(MESHES["gtp 8"]):
        found = gradient(gtp.shard(make(), nnx.Linear, min_size=64), drop(), x)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-15)


class Row(nnx.Module):
    """A chain of gtp_jax's own layers."""

    def __init__(self):
        self.layers = nnx.List([gtp.Dense(WIDTH, WIDTH, rngs=nnx.Rngs(i)) for i in range(4)])

    def __call__(self, x):
        return gtp.nn.run_chain(x, *self.layers)


def stock_row():
    return gtp.shard(nnx.Sequential(*[nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(i)) for i in range(4)]), min_size=64)


def test_backward_ends_at_the_first_block_that_is_trained():
    def lowered(model):
        trained = nnx.All(nnx.Param, lambda path, _: "2" in map(str, path))
        graph, own, rest = nnx.split(model, trained, ...)
        loss = lambda own, rest, x: jnp.sin(nnx.merge(graph, own, rest)(x)).mean()  # noqa: E731
        return jax.jit(jax.grad(loss)).lower(own, rest, jnp.ones((8, WIDTH)))

    with scope(MESHES["gtp 8"]):
        # counted before XLA removes what nothing uses: all weights in forward, one in backward
        for model in (Row(), stock_row()):
            assert lowered(model).as_text().count("stablehlo.all_gather") == 4 + 1
        text = lowered(stock_row()).compile().as_text()
    kinds = [call.kind for call in hlo.collectives(text)]
    assert kinds.count("reduce-scatter") == 1 and kinds.count("all-gather") == 4  # all in forward


def test_every_unit_but_the_first_is_prefetched_in_an_ordinary_call(x64):
    model = make("plain")
    with scope(MESHES["gtp 8"]):
        model = gtp.shard(model, min_size=64)
        found = gtp.explain(model, call=lambda model: model(tokens()))
    assert [call.prefetched for call in found.calls] == [False] + [True] * 3  # embedding, blocks, tied head
    blocks = ["blocks.0", "blocks.1"]
    assert [call.module for call in found.calls] == ["embed", *blocks, "embed"]
    assert [unit.module for unit in found.units] == [*blocks, "embed", ""]
    assert "ahead of its call if possible" in str(found) and "unroll" not in str(found)
    assert "blocks.0.up.bias" not in found.untouched and "norm.scale" in found.untouched


@pytest.mark.parametrize("way", others_full(["nnx.remat", "cond", "vmap", "scan"], ["cond", "scan"]))
def test_within_a_transformation_weights_are_gathered_at_the_call_and_the_report_says_so(way, x64):
    model = make(way)
    with scope(MESHES["gtp 8"]):
        model = gtp.shard(model, min_size=64)
        found = gtp.explain(model, call=lambda model: model(tokens(), way))
    calls = [call for call in found.calls if call.module != "embed"]
    assert calls and not any(call.prefetched for call in calls)
    assert {call.reason for call in calls} == {"called inside a transformation (scan, remat, cond, vmap, jit)"}
    assert "unroll it or use `gtp_jax.Stack`" in str(found)


@pytest.fixture
def frozen():
    """Keeps the collector, which runs after each trace here, away from what the worker already has."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("way", others_full(["plain", "nnx.remat", "jax.checkpoint", "cond", "vmap"], ["nnx.remat"]))
def test_no_tracer_outlives_its_trace(way, x64):
    model = make(way)
    with scope(MESHES["gtp 8"]), jax.checking_leaks():
        model = gtp.shard(model, min_size=64)
        nnx.jit(nnx.grad(mean_of(way))).lower(model, tokens())


@pytest.mark.parametrize("decorator", others_full([nnx.remat, nnx.jit], [nnx.jit]))
def test_a_block_whose_method_is_decorated_gathers_and_quantizes_as_others_do(decorator, x64):
    def stacked(decorated):
        class Block(nnx.Module):
            def __init__(self, rngs):
                self.linear = nnx.Linear(16, 16, rngs=rngs, param_dtype="float64")

            @(decorator if decorated else lambda method: method)
            def __call__(self, x):
                return x + self.linear(x)

        return lambda: nnx.Sequential(*[Block(nnx.Rngs(i)) for i in range(2)])

    x = np.random.default_rng(1).normal(size=(8, 16))
    assert_equal(*together(stacked(True), lambda model, x: (model(x) ** 2).mean(), x, MESHES["gtp 8"]))
    outputs = []
    for decorated in (True, False):
        with scope(MESHES["gtp 8"]), gtp.use_recipe(gtp.FP8()):
            model = gtp.shard(nnx.jit(stacked(decorated))(), min_size=64)
            calls = hook.calls_of(model, lambda model, x: model(x), x)
            assert [call.module for call in calls] == ["layers.0", "layers.1"]
            outputs.append(nnx.jit(lambda model, x: model(x))(model, x))
    np.testing.assert_allclose(*outputs, rtol=1e-12)
    plain = nnx.jit(lambda x: stacked(False)()(x))(x)
    assert np.abs(np.asarray(outputs[0]) - np.asarray(plain)).max() > 1e-3  # codes were multiplied
