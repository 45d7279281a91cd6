"""`FP8(matmuls=True, attention=True)`: attention behind the chosen projections multiplies in FP8, or is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gtp_jax as gtp
from gtp_jax.models import Llama, LlamaConfig, next_token_loss
from gtp_jax.ops import attention_fp8

MATMULS, BOTH = gtp.FP8(matmuls=True), gtp.FP8(matmuls=True, attention=True)
WIDTH, LENGTH = 64, 16


def layer(rngs, **options):
    shape = dict(num_heads=4, num_kv_heads=2, rope_theta=None, causal=True)
    return gtp.Attention(WIDTH, **{**shape, **options}, dtype=jnp.float32, rngs=rngs)


def inputs(batch=2):
    return jax.random.normal(jax.random.key(0), (batch, LENGTH, WIDTH))


def test_it_is_that_of_the_projected_queries_keys_and_values():
    model = gtp.init(layer, nnx.Rngs(0))
    with gtp.use_recipe(BOTH):
        found = model(inputs())
        heads = {name: jnp.reshape(y, (2, LENGTH, -1, 16)) for name, y in model.qkv(inputs()).items()}
        mixed = attention_fp8(heads["query"], heads["key"], heads["value"], causal=True)
        wanted = model.out(jnp.reshape(mixed, (2, LENGTH, WIDTH)))
    with gtp.use_recipe(MATMULS):
        without = model(inputs())
    np.testing.assert_array_equal(found, wanted)
    assert 1e-3 < np.linalg.norm(found - without) / np.linalg.norm(without) < 0.1


CONFIG = LlamaConfig(
    vocab_size=128,
    hidden_size=WIDTH,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    dtype="float32",
)


def gradients(recipe, mesh=None, remat="matmuls"):
    tokens = jax.random.randint(jax.random.key(1), (8, LENGTH), 0, 128)
    batch = {"tokens": tokens, "targets": jnp.roll(tokens, -1, 1)}
    with jax.set_mesh(gtp.make_mesh(**mesh or dict(gtp=1), devices=jax.devices()[: 8 if mesh else 1])):
        model = gtp.init(lambda rngs: Llama(CONFIG, rngs=rngs), nnx.Rngs(0))
        model.blocks.remat = remat
        state = gtp.TrainState.create(model, optax.identity())
        run = jax.jit(lambda state: gtp.loss_and_gradients(next_token_loss, state, batch, recipe=recipe))
        loss, grads = run(state)[:2]
        return {"loss": loss} | {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(grads)}


def distances(one, other):
    return [float(np.linalg.norm(one[n] - np.asarray(other[n])) / np.linalg.norm(other[n])) for n in other]


@pytest.mark.parametrize("mesh", [dict(gtp=8), dict(gtp=4, tp=2), dict(dp=2, gtp=4)], ids=str)
def test_on_a_mesh_gradients_are_those_of_one_device(mesh):
    """Up to the rank's own amaxes, of which most have the power of two of the whole."""
    alone = gradients(BOTH)
    found = distances(gradients(BOTH, mesh), alone)
    apart = distances(gradients(MATMULS), alone)
    assert max(found) < 0.05 and found[0] < 1e-3
    assert all(a > 1e-4 for a in apart)


@pytest.mark.parametrize("remat", ["nothing", "everything"])
def test_remat_policies_change_nothing(remat):
    np.testing.assert_allclose(distances(gradients(BOTH, remat=remat), gradients(BOTH, remat="matmuls")), 0, atol=1e-5)


def test_layers_in_high_precision_and_modules_of_other_recipes_have_none():
    model = gtp.init(lambda rngs: nnx.Dict(a=layer(rngs), b=layer(rngs)), nnx.Rngs(0))
    explained = gtp.explain(model, gtp.FP8(matmuls=True, attention=True, override={"b": MATMULS}))
    assert [fact.implementation for fact in explained.attentions] == ["FP8, written out", "written out"]
    assert [fact.reason for fact in explained.attentions] == ["cuDNN runs on GPUs only"] * 2
    with gtp.use_recipe(gtp.FP8(matmuls=True, attention=True, override={"b": MATMULS})):
        ours = model.a(inputs()), model.b(inputs())
    with gtp.use_recipe(BOTH):
        np.testing.assert_array_equal(ours[0], model.a(inputs()))
    with gtp.use_recipe(MATMULS):
        np.testing.assert_array_equal(ours[1], model.b(inputs()))


OPTIONS = {
    "window": (dict(window=4), {}),
    "soft_cap": (dict(soft_cap=10.0), {}),
    "sinks": (dict(sinks=True), {}),
    "mask": ({}, dict(mask=np.tri(LENGTH, dtype=bool))),
    "segment_ids": ({}, dict(segment_ids=np.zeros((2, LENGTH), np.int32))),
    "dropout": (dict(dropout_rate=0.5), dict(dropout_key=np.array([0, 1], np.uint32))),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_what_fp8_does_not_support_is_refused_by_name(name):
    options, given = OPTIONS[name]
    if "dropout_key" in given:
        given = {"dropout_key": jax.random.key(0)}
    model = gtp.init(lambda rngs: layer(nnx.Rngs(0, dropout=1), **options), nnx.Rngs(0))
    message = rf"attention in FP8, which does not support `{name}`\. Pass `attention=False` to the recipe, or name"
    with gtp.use_recipe(BOTH), pytest.raises(ValueError, match=message):
        model(inputs(), **{k: v if k == "dropout_key" else jnp.asarray(v) for k, v in given.items()})


def test_without_matmuls_and_for_models_of_others_it_is_refused():
    with pytest.raises(ValueError, match="`attention` requires `matmuls=True`"):
        gtp.FP8(attention=True)
    with pytest.raises(TypeError, match="`attention` is 1; it must be True or False"):
        gtp.FP8(matmuls=True, attention=1)  # pyright: ignore[reportArgumentType]
    with jax.set_mesh(gtp.make_mesh(gtp=8)), gtp.use_recipe(BOTH):
        model = gtp.shard(nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0))), nnx.Linear, min_size=64)
        with pytest.raises(ValueError, match=r"asks for attention in FP8, which only `gtp_jax\.Attention` and `gtp"):
            nnx.jit(lambda model, x: model(x))(model, inputs())


def test_cached_keys_are_attended_to_in_high_precision():
    model = gtp.init(lambda rngs: Llama(CONFIG, rngs=rngs), nnx.Rngs(0))
    with gtp.use_recipe(BOTH):
        found = gtp.generate(model, jnp.ones((1, 4), jnp.int32), max_new_tokens=4)
    assert np.asarray(jax.tree.leaves(found)[0]).size >= 4
