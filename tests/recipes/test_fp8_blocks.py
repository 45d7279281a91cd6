"""`FP8Blocks`: which modules it multiplies, what it refuses, what `explain` says of it, and that it trains."""

import dataclasses

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

from ..ops.oracle import rounded_blocked

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96
)


def scope(**degrees):
    return jax.set_mesh(gtp.make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))]))


def batch():
    tokens = np.random.default_rng(0).integers(0, 64, (8, 17)).astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def losses(recipe, config):
    optimizer = optax.sgd(0.1)
    state = gtp.TrainState.create(placed(lambda rngs: Llama(config, rngs=rngs)), optimizer)
    step, found = gtp.train_step(next_token_loss, optimizer, recipe=recipe), []
    for _ in range(6):
        state, metrics = step(state, batch())
        found.append(float(metrics["loss"]))
    return found


@pytest.mark.full
def test_experts_train_as_in_bfloat16():
    config = dataclasses.replace(CONFIG, num_experts=4)
    with scope(gtp=2, ep=2):
        found, wanted = losses(gtp.recipes.FP8Blocks(), config), losses(None, config)
    assert found[-1] < found[0] - 0.3 and found != wanted
    np.testing.assert_allclose(found, wanted, rtol=5e-2)  # tokens near the border choose other experts


def test_embedding_head_and_norms_stay_in_high_precision_and_explain_says_what_multiplies():
    with scope(gtp=4):
        model = abstract_model(lambda rngs: Llama(CONFIG, rngs=rngs))
        facts = {fact.module: fact for fact in gtp.explain(model, gtp.recipes.FP8Blocks()).facts}
    blocks = [name for name, fact in facts.items() if fact.wire == "FP8_BLOCKS"]
    assert sorted({name.split(".")[0] for name in blocks}) == ["blocks"] and len(blocks) == 4
    assert {fact.wire for name, fact in facts.items() if name not in blocks} == {"bfloat16"}
    fact = facts[blocks[0]]
    assert fact.forward == fact.dgrad == "E4M3 1x128 x E4M3 128x128" and fact.wgrad == "E4M3 1x128 x E4M3 1x128"
    assert "FP8_BLOCKS_1D: float32 values, as only Hopper GPUs" in fact.matmul
    assert fact.bytes_per_element == 1


def test_the_weight_gradient_multiplies_values_rounded_along_tokens_and_arrives_in_float32():
    rng = np.random.default_rng(0)
    x, c = (rng.normal(size=(2, 128, size)).astype(np.float32) for size in (64, 96))

    def loss(layer, batch):
        return jnp.sum(layer(batch["x"]) * batch["c"]), jnp.float32(1)

    with scope(gtp=1):
        layer = placed(lambda rngs: gtp.Dense(64, 96, dtype="float32", rngs=rngs))
        state = gtp.TrainState.create(layer, optax.sgd(1.0))
        run = jax.jit(lambda s, b: gtp.train.loss_and_gradients(loss, s, b, recipe=gtp.recipes.FP8Blocks(exclude=())))
        _, gradient = run(state, {"x": x, "c": c})
    wanted = rounded_blocked(x.reshape(256, 64).T, (1, 128)) @ rounded_blocked(c.reshape(256, 96).T, (1, 128)).T
    found = np.asarray(gradient["kernel"], np.float64)
    assert np.linalg.norm(found - wanted) <= 1e-6 * np.linalg.norm(wanted)


class Experts(nnx.Module):
    def __init__(self, rngs, hidden=128, **options):
        self.moe = gtp.nn.MoE(128, hidden, num_experts=4, top_k=2, rngs=rngs, **options)

    def __call__(self, x):
        return self.moe(x)


def test_a_second_derivative_through_experts_is_refused():
    with scope(gtp=2), gtp.use_recipe(gtp.recipes.FP8Blocks()):
        graph, state = nnx.split(abstract_model(Experts))
        total = lambda state, x: jnp.sum(nnx.merge(graph, state)(x).astype(jnp.float32))  # noqa: E731
        penalty = lambda state, x: jnp.sum(jax.grad(total, 1)(state, x) ** 2)  # noqa: E731
        with pytest.raises(TypeError, match=naming("differentiated again")):
            jax.eval_shape(jax.grad(penalty), state, jnp.ones((2, 4, 128), jnp.bfloat16))


def dense(width, out, **options):
    return lambda rngs: gtp.Dense(width, out, rngs=rngs, **options)


MODELS = {
    "tp that cuts tiles of experts": (
        lambda rngs: Experts(rngs, hidden=192, parallel="features"),
        dict(gtp=2, tp=2),
        "(4, 128, 192) moe.down 96",
    ),
    "an embedding": (lambda rngs: Llama(CONFIG, rngs=rngs), dict(gtp=2), "embed `exclude` `override`"),
    "tp that cuts tiles by column": (dense(320, 128, parallel="row"), dict(tp=2), "dimension 0 160"),
    "tp that divides one of two kernels unevenly": (
        dense(128, {"even": 512, "uneven": 384}, parallel="column", units={"even": 128, "uneven": 128}),
        dict(tp=2),
        "dimension 1 (128, 384) (256, 128)",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_cannot_be_multiplied_in_tiles_is_refused_by_name(name):
    make, degrees, message = MODELS[name]
    with scope(**degrees):
        model = placed(make)
        with pytest.raises(ValueError, match=naming(message)):
            gtp.explain(model, gtp.recipes.FP8Blocks(exclude=()))


def test_gathering_ahead_is_refused():
    with scope(gtp=4):
        state = gtp.TrainState.create(abstract_model(lambda rngs: Llama(CONFIG, rngs=rngs)), optax.sgd(0.1))
        step = gtp.train_step(next_token_loss, optax.sgd(0.1), recipe=gtp.recipes.FP8Blocks(), pregathered_layers=1)
        with pytest.raises(ValueError, match=naming("FP8_BLOCKS", "`pregathered_layers=0`")):
            step.lower(state, batch())
