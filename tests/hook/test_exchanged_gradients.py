"""`grad_wire` for models of stock layers: ranks exchange their gradients, and sum them in float32."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming
from placed import placed
from selection import others_full

import gtp_jax as gtp
from gtp_jax import hlo

from ..hlo.programs import needs_target
from .programs import HIDDEN, LAYERS, WIDTH, compiled
from .recipes import ALL_MESHES, BATCH, Dense, assert_near, flat, trained
from .steps import MESHES, scope, twins
from .test_overlap_h200 import TABLE, elements

SIZES = dict(hidden=192)
CASES = [
    (gtp.recipes.BF16(grad_wire="fp8"), "dp 2, gtp 4", "global"),
    (gtp.recipes.BF16(grad_wire="mxfp8"), "dp 2, gtp 4", "local"),
    (gtp.recipes.BF16(grad_wire="bf16"), "gtp 4, tp 2", "global"),
    (gtp.NVFP4(grad_wire="mxfp8"), "gtp 8", "global"),
    (gtp.FP8(matmuls=True, grad_wire="fp8"), "gtp 4, tp 2", "global"),
    (gtp.recipes.FP8Blocks(grad_wire="bf16"), "gtp 8", "local"),
]


def drawn(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def loss(model, x):
    return jnp.sin(3 * model(x)).sum(), jnp.float32(x.size)


def gradients(model, recipe, view, microbatches=1):
    x = drawn(BATCH, 4, 64)
    state = gtp.TrainState.create(model, optax.sgd(1.0))
    options = dict(recipe=recipe, view=view, microbatches=microbatches)
    found = jax.jit(lambda state, x: gtp.train.loss_and_gradients(loss, state, x, **options)[1])(state, x)
    return [np.asarray(gradient) for gradient in jax.tree.leaves(found)]


def pair(tp):
    """Returns a model of gtp_jax's own layers, and a sharded one of stock layers with the same weights."""
    own = placed(lambda rngs: Dense(rngs, own=True, tp=tp, **SIZES))
    model = nnx.jit(lambda: Dense(nnx.Rngs(0), own=False, tp=tp, **SIZES))()
    for block, other in zip(model.blocks, own.blocks, strict=True):
        block.kernel.set_value(jnp.asarray(np.asarray(other.kernel.get_value())))
    return own, gtp.shard(model, "blocks.*", min_size=64)


@pytest.mark.parametrize("recipe, mesh, view", others_full(CASES, CASES[4:5]), ids=str)
def test_gradients_are_those_of_gtp_jax_own_layers(recipe, mesh, view):
    with scope(ALL_MESHES[mesh]):
        own, model = pair("tp" in mesh)
        found, wanted = (gradients(one, recipe, view) for one in (model, own))
        plain = gradients(model, type(recipe)() if recipe.operands is None else None, view)
    for one, other, third in zip(found, wanted, plain, strict=True):
        size = np.abs(other).max()
        # a sum that is another in its last bit is rounded to another number, if it lies between two
        assert np.mean(np.abs(one - other) > 1e-5 * size) < 1e-2
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-2 * size)
        assert np.abs(one - third).max() > 1e-3 * size


def test_each_microbatch_exchanges_its_gradients():
    with scope(MESHES["gtp 8"]):
        own, model = pair(False)
        recipe = gtp.recipes.BF16(grad_wire="fp8")
        found, wanted = (gradients(one, recipe, "global", microbatches=2) for one in (model, own))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())


@pytest.mark.full
def test_a_block_within_remat_and_embeddings_train_as_without():
    found = trained("dp 2, gtp 4", recipe=gtp.recipes.BF16(grad_wire="bf16", exclude=()))
    wanted = trained("dp 2, gtp 4")
    assert_near({"losses": found["losses"]}, {"losses": wanted["losses"]}, 1e-3)
    assert any(np.any(found[name] != array) for name, array in wanted.items())


def test_a_weight_has_the_sum_of_the_gradients_of_its_products_and_of_its_other_uses():
    class Scaled(nnx.Module):
        def __init__(self, rngs):
            self.kernel = nnx.Param(jax.random.normal(rngs.params(), (64, 64)) / 8)

        def __call__(self, x):
            return jnp.tanh(x @ self.kernel[...]) * self.kernel[0] + x @ self.kernel[...].T

    x = drawn(BATCH, 4, 64)
    one, other = twins(lambda: nnx.Sequential(*[Scaled(nnx.Rngs(i)) for i in range(2)]))
    plain = nnx.jit(nnx.grad(lambda model: loss(model, x)[0] / x.size))(one)
    with scope(MESHES["gtp 8"]):
        model = gtp.shard(other, Scaled, min_size=64)
        found, wanted = (gradients(model, recipe, "global") for recipe in (gtp.recipes.BF16(grad_wire="bf16"), None))
    for one, other in zip(wanted, jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=5e-3 * np.abs(other).max())
        assert np.any(one != other)


@pytest.mark.full
def test_second_derivatives_are_those_without_an_exchange():
    x = drawn(BATCH, 64)

    def penalty(model, x):
        graph, state = nnx.split(model)
        inner = lambda x: jnp.sin(nnx.merge(graph, state)(x)).sum()  # noqa: E731
        return (jax.grad(inner)(x) ** 2).sum()

    with scope(MESHES["gtp 8"]):
        _, model = pair(False)
        wanted = flat(nnx.jit(nnx.grad(penalty))(model, x))
        with gtp.use_recipe(gtp.recipes.BF16(grad_wire="bf16")):
            found = flat(nnx.jit(nnx.grad(penalty))(model, x))
    assert_near(found, wanted, 1e-2)


def test_explain_names_what_is_exchanged_and_what_has_no_product():
    class Convolved(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(32, 32, rngs=rngs)
            self.conv = nnx.Conv(32, 32, (3,), rngs=rngs)

        def __call__(self, x):
            return self.conv(self.linear(x))

    recipe = gtp.NVFP4(grad_wire="fp8")
    with scope(MESHES["gtp 8"]):
        model = gtp.shard(nnx.jit(lambda: nnx.Sequential(Convolved(nnx.Rngs(0))))(), Convolved, min_size=64)
        found = gtp.explain(model, recipe, call=lambda model: model(jnp.ones((BATCH, 4, 32))))
        life = str(gtp.explain(model, recipe, path="layers.0.linear.kernel"))
    assert found.narrow == ("layers.0.conv.kernel",)
    assert re.search(naming("all-to-all FP8_E4M3 gtp float32 once"), life)


@pytest.mark.full
@needs_target
def test_the_matrices_of_a_block_are_sent_in_one_all_to_all_and_reduced_by_nothing_else():
    text, _ = compiled(recipe=gtp.NVFP4(grad_wire="bf16"))
    calls = hlo.collectives(text)
    sent = [c for c in calls if c.kind == "all-to-all"]
    assert len(sent) == LAYERS and {c.dtype for c in sent} == {"u16"}
    assert {sum(shape.elements for shape in c.operands) for c in sent} == {4 * WIDTH * WIDTH + 2 * WIDTH * HIDDEN}
    # XLA may join arrays end to end, so that their shapes are lost: a matrix would exceed what biases and norms leave
    others = sum(elements(c.operands) for c in calls if c.kind in ("reduce-scatter", "all-reduce"))
    assert 0 < others - 2 * TABLE < WIDTH * WIDTH
