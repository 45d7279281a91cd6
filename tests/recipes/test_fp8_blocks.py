"""`FP8Blocks`: which modules it multiplies, what it refuses, what `explain` says of it, and that it trains."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from placed import placed

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


def losses(recipe, steps=6, config=CONFIG):
    optimizer = optax.sgd(0.1)
    state = gtp.TrainState.create(placed(lambda rngs: Llama(config, rngs=rngs)), optimizer)
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
        model = placed(lambda rngs: Llama(CONFIG, rngs=rngs))
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
        layer = placed(lambda rngs: gtp.Dense(64, 96, dtype="float32", rngs=rngs))
        state = gtp.TrainState.create(layer, optax.sgd(1.0))
        _, gradient = gtp.loss_and_gradients(loss, state, {"x": x, "c": c}, recipe=gtp.FP8Blocks(exclude=()))
    wanted = rounded_blocked(x.reshape(256, 64).T, (1, 128)) @ rounded_blocked(c.reshape(256, 96).T, (1, 128)).T
    found = np.asarray(gradient["kernel"], np.float64)
    assert np.linalg.norm(found - wanted) <= 1e-6 * np.linalg.norm(wanted)


class Experts(nnx.Module):
    def __init__(self, rngs, hidden=128, **options):
        self.moe = gtp.MoE(128, hidden, num_experts=4, top_k=2, rngs=rngs, **options)

    def __call__(self, x):
        return self.moe(x)


def test_explain_says_what_experts_multiply():
    with scope(gtp=2, ep=2):
        model = gtp.init(Experts, nnx.Rngs(0))
        facts = {fact.module: fact for fact in gtp.explain(model, gtp.FP8Blocks()).facts}
        life = str(gtp.explain(model, gtp.FP8Blocks(), path="moe.up"))
    for fact, kernels in ((facts["moe.up"], 2), (facts["moe.down"], 1)):
        assert (fact.wire, fact.bytes, fact.bytes_per_element) == ("FP8_BLOCKS", kernels * 4 * 128 * 128, 1)
        assert fact.matmul == "FP8_BLOCKS_1D: grouped, bfloat16 on dequantized values"
        assert (fact.forward, fact.dgrad, fact.wgrad) == (
            "E4M3 1x128 x E4M3 128x128",
            "E4M3 1x128 x E4M3 128x128",
            "E4M3 1x128 x E4M3 1x128",
        )
    assert "one amax for each tile, reduced over all shards" in life and "Tiles" in life


def test_experts_train_as_in_bfloat16():
    config = dataclasses.replace(CONFIG, num_experts=4)
    with scope(gtp=2, ep=2):
        found, wanted = losses(gtp.FP8Blocks(), config=config), losses(None, config=config)
    assert found[-1] < found[0] - 0.3
    np.testing.assert_allclose(found, wanted, rtol=5e-2)  # tokens near the border choose other experts
    assert found != wanted


def test_a_second_derivative_through_experts_is_refused():
    with scope(gtp=2):
        model = gtp.init(Experts, nnx.Rngs(0))
        graph, state = nnx.split(model)
        x = jnp.ones((2, 4, 128), jnp.bfloat16)

        def penalty(state, x):
            return jnp.sum(jax.grad(lambda x: jnp.sum(nnx.merge(graph, state)(x).astype(jnp.float32)))(x) ** 2)

        with gtp.use_recipe(gtp.FP8Blocks()), pytest.raises(TypeError, match="differentiated again.*grouped_quantized"):
            jax.jit(jax.grad(penalty)).lower(state, x)


def dense(width, out, **options):
    return lambda rngs: gtp.Dense(width, out, rngs=rngs, **options)


MODELS = {
    "tp that cuts tiles of experts": (
        lambda rngs: Experts(rngs, hidden=192, parallel="features"),
        dict(gtp=2, tp=2),
        r"dimension 2 of the weight of shape \(4, 128, 192\) of moe\.down into parts of 96, which are not whole tiles",
    ),
    "an embedding": (
        lambda rngs: Llama(CONFIG, rngs=rngs),
        dict(gtp=2),
        r"which only dense layers and experts support, but embed is not a dense layer\. Name embed in .* `exclude`"
        r".* `override`",
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
        r"dimension 1 .* of shape \(128, 384\) .* into uneven parts of \(256, 128\) elements, which FP8_BLOCKS ",
    ),
    "tp that divides one of two kernels unevenly": (
        dense(128, {"even": 512, "uneven": 384}, parallel="column", units={"even": 128, "uneven": 128}),
        dict(tp=2),
        r"dimension 1 .* of shape \(128, 384\) .* into uneven parts of \(256, 128\) elements",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_cannot_be_multiplied_in_tiles_is_refused_by_name(name):
    make, degrees, message = MODELS[name]
    with scope(**degrees):
        model = placed(make)
        with pytest.raises(ValueError, match=message):
            gtp.explain(model, gtp.FP8Blocks(exclude=()))


def test_layers_of_whole_tiles_per_tensor_rank_are_multiplied():
    with scope(gtp=2, tp=2):
        model = placed(dense(128, 256, parallel="column"))
        assert gtp.explain(model, gtp.FP8Blocks(exclude=())).facts[0].wire == "FP8_BLOCKS"


@pytest.mark.parametrize("parallel", ["features", "expert", None])
def test_experts_of_whole_tiles_per_tensor_rank_are_multiplied(parallel):
    with scope(gtp=2, tp=2):
        model = gtp.init(lambda rngs: Experts(rngs, hidden=256, parallel=parallel), nnx.Rngs(0))
        assert {fact.wire for fact in gtp.explain(model, gtp.FP8Blocks()).facts} == {"FP8_BLOCKS"}


def test_gathering_ahead_is_refused():
    with scope(gtp=4):
        model = placed(lambda rngs: Llama(CONFIG, rngs=rngs))
        optimizer = optax.sgd(0.1)
        state = gtp.TrainState.create(model, optimizer)
        step = gtp.train_step(next_token_loss, optimizer, recipe=gtp.FP8Blocks(), pregathered_layers=1)
        with pytest.raises(
            ValueError, match="sent in FP8_BLOCKS, which cannot be gathered in advance. Pass `pregathered_la"
        ):
            step(state, batch())
