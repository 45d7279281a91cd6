"""`FP8Blocks`: which modules it multiplies, what it refuses, what `explain` says of it, and that it trains."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gtp_jax as gtp
from gtp_jax.models import Llama, LlamaConfig, next_token_loss

from ..ops.oracle import rounded_blocked

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96
)


def scope(**degrees):
    return jax.set_mesh(gtp.make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))]))


def batch():
    tokens = jax.random.randint(jax.random.key(0), (8, 17), 0, 64)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def losses(recipe, steps=6):
    optimizer = optax.sgd(0.1)
    state = gtp.TrainState.create(gtp.init(lambda rngs: Llama(CONFIG, rngs=rngs), nnx.Rngs(0)), optimizer)
    step, found = gtp.train_step(next_token_loss, optimizer, recipe=recipe), []
    for _ in range(steps):
        state, metrics = step(state, batch())
        found.append(float(metrics["loss"]))
    return found


def test_a_model_trains_as_in_bfloat16():
    with scope(gtp=4):
        found, wanted = losses(gtp.FP8Blocks()), losses(None)
    assert found[-1] < found[0] - 0.5
    np.testing.assert_allclose(found, wanted, rtol=2e-2)
    assert found != wanted


def test_embedding_head_and_norms_stay_in_high_precision_and_explain_says_what_multiplies():
    with scope(gtp=4):
        model = gtp.init(lambda rngs: Llama(CONFIG, rngs=rngs), nnx.Rngs(0))
        facts = {fact.module: fact for fact in gtp.explain(model, gtp.FP8Blocks()).facts}
        life = str(gtp.explain(model, gtp.FP8Blocks(), path="mlp.down"))
    blocks = [name for name, fact in facts.items() if fact.wire == "FP8_BLOCKS"]
    assert sorted({name.split(".")[0] for name in blocks}) == ["blocks"] and len(blocks) == 4
    assert {fact.wire for name, fact in facts.items() if name not in blocks} == {"bfloat16"}
    fact = facts[blocks[0]]
    assert (fact.forward, fact.dgrad, fact.wgrad) == (
        "E4M3 1x128 x E4M3 128x128",
        "E4M3 1x128 x E4M3 128x128",
        "E4M3 1x128 x E4M3 1x128",
    )
    assert "FP8_BLOCKS_1D: float32 values, as only Hopper GPUs" in fact.matmul
    assert fact.bytes_per_element == 1
    assert "one amax for each tile" in life and "Tiles" in life


def test_the_weight_gradient_multiplies_values_rounded_along_tokens_and_arrives_in_float32():
    rng = np.random.default_rng(0)
    x, c = (rng.normal(size=(2, 128, size)).astype(np.float32) for size in (64, 96))

    def loss(layer, batch):
        return jnp.sum(layer(batch["x"]) * batch["c"]), jnp.float32(1)

    with scope(gtp=1):
        layer = gtp.init(lambda rngs: gtp.Dense(64, 96, dtype="float32", rngs=rngs), nnx.Rngs(0))
        state = gtp.TrainState.create(layer, optax.sgd(1.0))
        _, gradient = gtp.loss_and_gradients(loss, state, {"x": x, "c": c}, recipe=gtp.FP8Blocks(exclude=()))
    wanted = rounded_blocked(x.reshape(256, 64).T, (1, 128)) @ rounded_blocked(c.reshape(256, 96).T, (1, 128)).T
    found = np.asarray(gradient["kernel"], np.float64)
    assert np.linalg.norm(found - wanted) <= 1e-6 * np.linalg.norm(wanted)


class Experts(nnx.Module):
    def __init__(self, rngs):
        self.moe = gtp.MoE(128, 128, num_experts=4, top_k=2, rngs=rngs)

    def __call__(self, x):
        return self.moe(x)


def dense(width, out, **options):
    return lambda rngs: gtp.Dense(width, out, rngs=rngs, **options)


MODELS = {
    "experts": (
        Experts,
        dict(gtp=2),
        r"FP8_BLOCKS, which only dense layers support, but moe\.\S+ is experts\. Name moe",
    ),
    "an embedding": (
        lambda rngs: Llama(CONFIG, rngs=rngs),
        dict(gtp=2),
        r"which only dense layers support, but embed is not a dense layer\. Name embed in .* `exclude`.* `override`",
    ),
    "tp that cuts tiles by row": (
        dense(256, 192, parallel="column"),
        dict(gtp=2, tp=2),
        r"dimension 1 of the weight of shape \(256, 192\) .* into parts of 96, which are not whole tiles of FP8_BLOCKS "
        r"\(128 elements\).* another tensor degree",
    ),
    "tp that cuts tiles by column": (dense(320, 128, parallel="row"), dict(tp=2), r"dimension 0 .* parts of 160"),
    "tp that divides unevenly": (
        dense(128, 384, parallel="column", units=128),
        dict(tp=2),
        r"dimension 1 .* into parts of \(2, 1\), which are not whole tiles",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_cannot_be_multiplied_in_tiles_is_refused_by_name(name):
    make, degrees, message = MODELS[name]
    with scope(**degrees):
        model = gtp.init(make, nnx.Rngs(0))
        with pytest.raises(ValueError, match=message):
            gtp.explain(model, gtp.FP8Blocks(exclude=()))


def test_layers_of_whole_tiles_per_tensor_rank_are_multiplied():
    with scope(gtp=2, tp=2):
        model = gtp.init(dense(128, 256, parallel="column"), nnx.Rngs(0))
        assert gtp.explain(model, gtp.FP8Blocks(exclude=())).facts[0].wire == "FP8_BLOCKS"


def test_freezing_and_gathering_ahead_are_refused():
    with scope(gtp=4):
        model = gtp.init(lambda rngs: Llama(CONFIG, rngs=rngs), nnx.Rngs(0))
        with pytest.raises(ValueError, match="in FP8_BLOCKS, which cannot be stored"):
            gtp.freeze(model, gtp.FP8Blocks(), trained=nnx.PathContains("embed"))
        optimizer = optax.sgd(0.1)
        state = gtp.TrainState.create(model, optimizer)
        step = gtp.train_step(next_token_loss, optimizer, recipe=gtp.FP8Blocks(), pregathered_layers=1)
        with pytest.raises(
            ValueError, match="sent in FP8_BLOCKS, which cannot be gathered in advance. Pass `pregathered_la"
        ):
            step(state, batch())
