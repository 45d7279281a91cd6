"""Experts of a preset as command lines change them: counted, saved and refused as what they are."""

import dataclasses
import math

import jax
import pytest
from flax import nnx
from messages import naming

import gtp_jax as gtp
from gtp_jax.models import PRESETS, build, saved, saved_config
from gtp_jax.nn import Routing, abstract_model
from gtp_jax.runner.flags import ExpertOptions

CHANGED = ExpertOptions(
    top_k=3, shared_hidden=48, transport="padded", round_size=2.0, router_score="sigmoid", router_normalize=False,
    router_num_groups=4, router_top_groups=2, router_bias_rate=0.001,
)  # fmt: skip


def test_what_differs_from_a_preset_is_counted_and_saved():
    preset = PRESETS["tiny-moe"]
    assert ExpertOptions().of(preset, "tiny-moe") == preset and "routing" not in preset.architecture()
    config = CHANGED.of(preset, "tiny-moe")
    routing = Routing(score="sigmoid", normalize=False, num_groups=4, top_groups=2, bias_rate=0.001)
    assert (config.top_k, config.transport, config.round_size, config.routing) == (3, "padded", 2.0, routing)
    model = nnx.eval_shape(lambda: build(config, rngs=nnx.Rngs(0)))
    block = model.blocks.layers.mlp
    assert (block.top_k, block.transport, block.round_size, block.routing) == (3, "padded", 2.0, routing)
    arrays = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert config.param_count() == sum(math.prod(a.shape) for a in arrays)
    with jax.set_mesh(gtp.make_mesh(gtp=1, ep=2, devices=jax.devices()[:2])):
        text = str(gtp.explain(abstract_model(lambda rngs: build(config, rngs=rngs)), None))
    assert "3 of 8 and a shared one" in text and "sending tokens over ep 2 (padded), 4 experts per rank" in text
    # what a checkpoint says is enough to build the model again; the rate of its biases is how it was trained
    found = saved_config(saved(config))
    assert found.architecture() == config.architecture() and found.routing.bias_rate == 0.0
    assert dataclasses.replace(preset, routing={"score": "sigmoid"}).routing == Routing(score="sigmoid")
    faster = dataclasses.replace(config, routing=dataclasses.replace(routing, bias_rate=0.1))
    assert faster.architecture() == config.architecture()


def test_the_active_parameters_of_experts_are_counted():
    # attention, 8 experts of 768, the router; and the head: by hand, as published: 3.3 B active of 30.5 B
    qwen = PRESETS["qwen3-30b-a3b"]
    assert qwen.matmul_params() == 48 * (2048 * 128 * 72 + 8 * 3 * 2048 * 768 + 2048 * 128) + 151936 * 2048
    assert round(qwen.param_count() / 1e9, 1) == 30.5


REFUSED = [
    (lambda: ExpertOptions(transport="fast"), "`transport` 'fast' gather padded ragged"),
    (lambda: ExpertOptions(top_k=2).of(PRESETS["tiny"], "tiny"), "'tiny' no experts --top-k"),
    (lambda: ExpertOptions(top_k=9).of(PRESETS["tiny-moe"], "tiny-moe"), "`top_k` 9 8 experts"),
    (lambda: dataclasses.replace(PRESETS["tiny-moe"], routing=Routing(jitter=0.1)), "`jitter` 0.1 keys"),
    (lambda: dataclasses.replace(PRESETS["tiny"], shared_hidden=8), "`num_experts` 0"),
    (lambda: dataclasses.replace(PRESETS["tiny-moe"], routing="sigmoid"), "`gtp_jax.nn.Routing`"),
    (lambda: dataclasses.replace(PRESETS["tiny"], expert_biases=True), "`expert_biases` True `num_experts` 0"),
    (lambda: dataclasses.replace(PRESETS["tiny"], swiglu_limit=7.0), "`swiglu_limit` 7.0 `num_experts` 0"),
    (lambda: dataclasses.replace(PRESETS["tiny-moe"], activation="gelu_tanh"), "`activation` 'gelu_tanh' 'silu'"),
    (lambda: dataclasses.replace(PRESETS["tiny-moe"], norm="zero_centered_rms"), "`norm` 'zero_centered_rms' 'rms'"),
]


@pytest.mark.parametrize("part", [dict(expert_biases=True), dict(swiglu_limit=7.0)])
def test_parts_that_travelling_tokens_do_not_get_are_refused(part):
    config = dataclasses.replace(PRESETS["tiny-moe"], **part)
    with jax.set_mesh(gtp.make_mesh(gtp=1, ep=2, devices=jax.devices()[:2])):
        with pytest.raises(ValueError, match=naming("`biases` `limit` ep = 2 degree of 1")):
            abstract_model(lambda rngs: build(config, rngs=rngs))


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_experts_that_a_model_cannot_have_are_refused(make, message):
    with pytest.raises(ValueError, match=naming(message)):
        make()
