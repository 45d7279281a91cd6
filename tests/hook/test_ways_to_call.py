"""However a model calls its blocks, its loss, gradients and steps are those of the model without a mesh."""

import functools
import gc

import jax
import numpy as np
import pytest
from flax import nnx
from selection import others_full

import gtp_jax as gtp
from gtp_jax import hook

from .models import DEPTH, GPT2, WAYS, WITHOUT_DROPOUT, mean_of, tokens
from .steps import MESHES, assert_equal, scope, together, train


def usual_pairs(ways):
    """Returns each way with one of the meshes."""
    return [(way, list(MESHES)[i % len(MESHES)]) for i, way in enumerate(ways)]


def make(way, depth=DEPTH):
    return lambda: GPT2(nnx.Rngs(0, dropout=1), dropout=0.0 if way in WITHOUT_DROPOUT else 0.1, depth=depth)


@functools.cache
def without_mesh(way):
    return train(make(way)(), mean_of(way), tokens())


# the others run with `-m slow`: each compiles two programs
USUAL = ["plain", "hidden state", "stop_gradient", "repeated", "U shape", "nnx.remat", "cond", "vmap"]


@pytest.mark.parametrize("way, mesh", others_full([(w, m) for w in WAYS for m in MESHES], usual_pairs(USUAL)))
def test_three_steps_are_those_without_a_mesh(way, mesh, x64):
    stay = way != "plain"  # with "plain", later steps start from the compiler's shardings
    with scope(MESHES[mesh]):
        model = gtp.shard(make(way)(), "blocks.*", min_size=64)
        found = train(model, mean_of(way), tokens(), stay=stay)
    assert_equal(found, without_mesh(way))


@pytest.mark.parametrize("remat", ["nothing", pytest.param("everything", marks=pytest.mark.slow)])
def test_remat_changes_no_number(remat, x64):
    with scope(MESHES["gtp 8"]):
        found = train(gtp.shard(make("plain")(), min_size=64, remat=remat), mean_of("plain"), tokens())
    assert_equal(found, without_mesh("plain"))


def test_blocks_called_by_the_loss_itself_are_right(x64):
    def loss(model, tokens):
        x = model.embed(tokens)
        for block in (*model.blocks, *model.blocks[::-1]):
            x = block(x)
        return (x**2).mean()

    found, wanted = together(make("plain", depth=2), loss, tokens(), MESHES["gtp 8"])
    assert_equal(found, wanted)


def prefetched(way, loss=None):
    with scope(MESHES["gtp 8"]):
        model = gtp.shard(make(way)(), min_size=64)
        return hook.calls_of(model, mean_of(way) if loss is None else loss, tokens())


def test_every_unit_but_the_first_is_prefetched_in_an_ordinary_call(x64):
    calls = prefetched("plain")
    assert [call.prefetched for call in calls] == [False] + [True] * (DEPTH + 1)  # embedding, blocks, tied head
    assert [call.module for call in calls] == ["embed", *(f"blocks.{i}" for i in range(DEPTH)), "embed"]


@pytest.mark.parametrize("way", ["nnx.remat", "cond", "vmap", "scan"])
def test_within_a_transformation_weights_are_gathered_at_the_call_and_the_report_says_so(way, x64):
    calls = [call for call in prefetched(way) if call.module != "embed"]
    assert not any(call.prefetched for call in calls)
    assert {call.reason for call in calls} == {"called inside a transformation (scan, remat, cond, vmap, jit)"}


@pytest.mark.parametrize("way, advised", [("scan", True), ("plain", False)])
def test_explain_says_to_unroll_a_transformation_or_to_use_a_stack(way, advised, x64):
    with scope(MESHES["gtp 8"]):
        model = gtp.shard(make(way)(), min_size=64)
        text = str(gtp.explain(model, call=lambda model: model(tokens(), way)))
    assert ("to gather ahead of calls inside a transformation, unroll it or use `gtp_jax.Stack`" in text) == advised


def test_second_derivatives_are_those_without_a_mesh(x64):
    def penalty(model, tokens):
        graph, state = nnx.split(model)
        inner = lambda state: mean_of("plain")(nnx.merge(graph, state), tokens)  # noqa: E731
        gradients = jax.grad(inner, allow_int=True)(state)
        return sum((g**2).sum() for g in jax.tree.leaves(gradients) if g.dtype == np.float64)

    found, wanted = together(make("vmap", depth=2), penalty, tokens(), MESHES["gtp 8"], steps=2)
    assert_equal(found, wanted, 1e-9)


@pytest.fixture
def frozen():
    """Keeps the collector, which runs after each trace here, away from what the worker already has."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("frozen")
def test_no_tracer_outlives_its_trace(x64):
    with scope(MESHES["gtp 8"]), jax.checking_leaks():
        for way in ("plain", "nnx.remat", "jax.checkpoint", "cond", "vmap"):
            model = gtp.shard(make(way, depth=2)(), min_size=64)
            nnx.jit(nnx.grad(mean_of(way))).lower(model, tokens())


@pytest.mark.parametrize("decorator", [nnx.jit, nnx.remat])
def test_a_block_whose_method_is_decorated_gathers_and_quantizes_as_others_do(decorator, x64):
    def stacked(decorated):
        class Block(nnx.Module):
            def __init__(self, rngs):
                self.linear = nnx.Linear(16, 16, rngs=rngs, param_dtype="float64")

            @(decorator if decorated else lambda method: method)
            def __call__(self, x):
                return x + self.linear(x)

        def make():
            rngs = nnx.Rngs(0)
            return nnx.Sequential(*[Block(rngs) for _ in range(2)])

        return make

    x = jax.random.normal(jax.random.key(1), (8, 16), "float64")
    found, wanted = together(stacked(True), lambda model, x: (model(x) ** 2).mean(), x, MESHES["gtp 8"])
    assert_equal(found, wanted)
    outputs = []
    for decorated in (True, False):
        with scope(MESHES["gtp 8"]), gtp.use_recipe(gtp.FP8()):
            model = gtp.shard(stacked(decorated)(), min_size=64)
            calls = hook.calls_of(model, lambda model, x: model(x), x)
            assert [call.module for call in calls] == ["layers.0", "layers.1"]
            outputs.append(nnx.jit(lambda model, x: model(x))(model, x))
    np.testing.assert_allclose(*outputs, rtol=1e-12)
    assert abs(outputs[0] - stacked(False)()(x)).max() > 1e-3  # codes were multiplied
