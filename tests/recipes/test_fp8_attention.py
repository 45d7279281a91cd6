"""`FP8(matmuls=True, attention=True)`: attention behind the chosen projections multiplies in FP8, or is refused."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming
from placed import placed

import gtp_jax as gtp
from gtp_jax.models import Llama, LlamaConfig, next_token_loss
from gtp_jax.nn import abstract_model
from gtp_jax.ops import attention_fp8

MATMULS, BOTH = gtp.FP8(matmuls=True), gtp.FP8(matmuls=True, attention=True)
WIDTH, LENGTH = 64, 16


def layer(rngs, **options):
    shape = dict(num_heads=4, num_kv_heads=2, rope_theta=None, causal=True)
    return gtp.Attention(WIDTH, **{**shape, **options}, dtype=jnp.float32, rngs=rngs)


X = np.random.default_rng(0).normal(size=(2, LENGTH, WIDTH)).astype(np.float32)


def test_it_is_that_of_the_projected_queries_keys_and_values():
    graph, state = nnx.split(gtp.init(layer, nnx.Rngs(0)))

    @jax.jit
    def apart(state, x):
        model = nnx.merge(graph, state)
        heads = {name: jnp.reshape(y, (2, LENGTH, -1, 16)) for name, y in model.qkv(x).items()}
        mixed = attention_fp8(heads["query"], heads["key"], heads["value"], causal=True)
        return model.out(jnp.reshape(mixed, (2, LENGTH, WIDTH)))

    with gtp.use_recipe(BOTH):
        found, wanted = jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, X), apart(state, X)
    with gtp.use_recipe(MATMULS):
        without = jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, X)
    np.testing.assert_array_equal(found, wanted)
    assert 1e-3 < np.linalg.norm(found - without) / np.linalg.norm(without) < 0.1


SIZES = dict(vocab_size=128, hidden_size=WIDTH, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=128)
CONFIG = LlamaConfig(**SIZES, num_layers=2, dtype="float32")


@functools.cache
def gradients(recipe, degrees=(("gtp", 1),), remat="matmuls", layers=2):
    config = dataclasses.replace(CONFIG, num_layers=layers)
    tokens = np.random.default_rng(1).integers(0, 128, (8, LENGTH)).astype(np.int32)
    batch = {"tokens": tokens, "targets": np.roll(tokens, -1, 1)}
    with jax.set_mesh(gtp.make_mesh(**dict(degrees), devices=jax.devices()[: math.prod(dict(degrees).values())])):
        model = placed(lambda rngs: Llama(config, rngs=rngs))
        model.blocks.remat = remat
        state = gtp.TrainState.create(model, optax.identity())
        run = jax.jit(lambda state: gtp.train.loss_and_gradients(next_token_loss, state, batch, recipe=recipe))
        loss, grads = jax.tree.map(np.asarray, run(state)[:2])
        return {"loss": loss} | {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(grads)}


def distances(one, other):
    return [float(np.linalg.norm(one[n] - np.asarray(other[n])) / np.linalg.norm(other[n])) for n in other]


MESHES = [(("gtp", 4), ("tp", 2)), (("gtp", 8),), (("dp", 2), ("gtp", 4))]


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_on_a_mesh_gradients_are_those_of_one_device(mesh):
    """Up to the rank's own amaxes, of which most have the power of two of the whole."""
    alone = gradients(BOTH, layers=1)
    found = distances(gradients(BOTH, mesh, layers=1), alone)
    apart = distances(gradients(MATMULS, layers=1), alone)
    assert max(found) < 0.05 and found[0] < 1e-3
    assert all(a > 1e-4 for a in apart)


@pytest.mark.full
@pytest.mark.parametrize("remat", ["nothing", "attention", "everything"])
def test_remat_policies_change_nothing(remat):
    np.testing.assert_allclose(distances(gradients(BOTH, remat=remat), gradients(BOTH, remat="matmuls")), 0, atol=1e-5)


def test_layers_in_high_precision_and_modules_of_other_recipes_have_none():
    model = gtp.init(lambda rngs: nnx.Dict(a=layer(rngs), b=layer(rngs)), nnx.Rngs(0))
    recipe = gtp.FP8(matmuls=True, attention=True, override={"b": MATMULS})
    explained = gtp.explain(model, recipe).attentions
    assert [fact.implementation for fact in explained] == ["FP8, written out", "written out"]
    assert all(fact.reason.startswith("cuDNN runs on GPUs only") for fact in explained)
    graph, state = nnx.split(model)
    found = {}
    for one in (recipe, BOTH, MATMULS):
        with gtp.use_recipe(one):
            found[one] = jax.jit(lambda s, x: [f(x) for f in nnx.merge(graph, s).values()])(state, X)
    np.testing.assert_array_equal(found[recipe][0], found[BOTH][0])
    np.testing.assert_array_equal(found[recipe][1], found[MATMULS][1])


OPTIONS = {
    "window": (dict(window=4), {}),
    "soft_cap": (dict(soft_cap=10.0), {}),
    "sinks": (dict(sinks=True), {}),
    "mask": ({}, dict(mask=np.tri(LENGTH, dtype=bool))),
    "segment_ids": ({}, dict(segment_ids=np.zeros((2, LENGTH), np.int32))),
    "dropout": (dict(dropout_rate=0.5), {}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_what_fp8_does_not_support_is_refused_by_name(name):
    options, given = OPTIONS[name]
    given = {"dropout_key": jax.random.key(0)} if name == "dropout" else jax.tree.map(jnp.asarray, given)
    graph, state = nnx.split(abstract_model(lambda rngs: layer(nnx.Rngs(0, dropout=1), **options)))
    with gtp.use_recipe(BOTH), pytest.raises(ValueError, match=naming("FP8", f"`{name}`", "`attention=False`")):
        jax.eval_shape(lambda state, x: nnx.merge(graph, state)(x, **given), state, X)


def test_without_matmuls_and_for_models_of_others_it_is_refused():
    with pytest.raises(ValueError, match=naming("`attention` `matmuls=True`")):
        gtp.FP8(attention=True)
    with pytest.raises(TypeError, match=naming("`attention` 1 True False")):
        gtp.FP8(matmuls=True, attention=1)  # pyright: ignore[reportArgumentType]
    with jax.set_mesh(gtp.make_mesh(gtp=8)), gtp.use_recipe(BOTH):
        model = gtp.shard(nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0))), nnx.Linear, min_size=64)
        with pytest.raises(ValueError, match=naming("FP8 `gtp_jax.Attention`")):
            nnx.jit(lambda model, x: model(x))(model, X)
