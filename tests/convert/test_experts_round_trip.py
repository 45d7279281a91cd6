"""Mixtral and Qwen3 with experts, from Hugging Face's files and back: every bit, and what they compute."""

import dataclasses
import json

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from messages import naming
from selection import others_full

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.convert import export_llama, import_llama
from gtp_jax.convert._config import read_config
from gtp_jax.models import PRESETS, Llama, hugging_face_of
from gtp_jax.nn import Routing, abstract_model

from .hugging_face import CONFIG, MIXTRAL, QWEN3_MOE, assert_same, logits, random_tensors, read_model, write_model

QWEN3 = {**CONFIG, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "use_sliding_window": False}
MISSING = object()
MODELS = {"mixtral": MIXTRAL, "qwen3_moe": QWEN3_MOE, "qwen3": QWEN3}


@pytest.mark.parametrize("name", others_full(MODELS, ["mixtral"]))
def test_a_model_comes_back_bit_for_bit_and_computes_what_its_tensors_say(name, tmp_path):
    config = MODELS[name]
    tensors = random_tensors(config)
    done = import_llama(write_model(tmp_path / "hf", tensors, config, files=2), tmp_path / "imported")
    exported = export_llama(tmp_path / "imported", tmp_path / "out", dtype="float32")
    assert_same(read_model(tmp_path / "out"), tensors)
    assert exported.tensors == len(tensors)
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert {key: written[key] for key in config} == config
    model = dataclasses.replace(done.config, dtype="float32")
    tokens = np.random.default_rng(1).integers(0, config["vocab_size"], (4, 24), dtype=np.int32)
    with jax.set_mesh(gtp.make_mesh(gtp=2, ep=2, devices=jax.devices()[:4])):
        like = gtp.TrainState.create(abstract_model(lambda rngs: Llama(model, rngs=rngs)), optax.sgd(1.0))
        params = Checkpoints(tmp_path / "imported", read_only=True).restore_params(like)
        placed = jax.device_put(tokens, NamedSharding(jax.sharding.get_mesh(), P(("dp", "gtp", "ep"))))
        found = jax.jit(lambda params, tokens: like.model_def.model(params)(tokens))(params, placed)
    wanted = logits(tensors, config, tokens)
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_weights_that_share_a_scale_are_of_one_expert():
    config = PRESETS["tiny-moe"]
    groups = {}
    for tensor in hugging_face_of(config).tensors(config):
        if tensor.expert is not None:
            groups.setdefault(tensor.fused, []).append((tensor.layer, tensor.expert))
    assert all(len(set(members)) == 1 for members in groups.values())
    assert {len(members) for members in groups.values()} == {1, 2}  # down; gate and up


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"router_jitter_noise": 0.1}, "router_jitter_noise 0.1"),
        ({"num_local_experts": 0}, "num_local_experts 0 'mixtral' 1"),
        ({"num_experts_per_tok": 9}, "`top_k` 9 8"),
        ({"architectures": ["MixtralForTokenClassification"]}, "'mixtral' MixtralForCausalLM"),
    ],
)
def test_mixtures_that_are_not_computed_are_refused(changes, message, tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**MIXTRAL, **changes}))
    with pytest.raises(ValueError, match=naming(message)):
        import_llama(folder, tmp_path / "out")


def test_configurations_of_every_version_of_transformers_say_the_same(tmp_path):
    """Fields that are left out have transformers' defaults; `Qwen3MoeConfig` of version 5 maps `num_experts`."""

    def read(config, **changes):
        fields = {name: value for name, value in {**config, **changes}.items() if value is not MISSING}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return read_config(tmp_path)[0]

    usual = read(QWEN3_MOE)
    assert read(QWEN3_MOE, num_experts=MISSING, num_local_experts=8) == usual
    assert read(QWEN3_MOE, mlp_only_layers=None, decoder_sparse_step=1) == usual
    assert read(QWEN3, head_dim=MISSING).head_dim == 128  # and not the hidden size over the heads
    assert read(MIXTRAL, head_dim=MISSING).head_dim == 16


def test_what_hugging_face_cannot_store_is_refused(tmp_path):
    mixtral = PRESETS["mixtral"]
    assert hugging_face_of(mixtral).architecture == "MixtralForCausalLM"
    assert hugging_face_of(PRESETS["qwen3-30b-a3b"]).architecture == "Qwen3MoeForCausalLM"
    for changes in (
        {"routing": Routing(score="sigmoid")},
        {"routing": Routing(bias_rate=0.001)},
        {"routing": Routing(normalize=False)},
        {"shared_hidden": 64},
        {"qkv_bias": True},
    ):
        with pytest.raises(ValueError, match=naming("LlamaForCausalLM MistralForCausalLM")):
            hugging_face_of(dataclasses.replace(mixtral, **changes))
    unnormalized = dataclasses.replace(PRESETS["qwen3-30b-a3b"], routing=Routing(normalize=False))
    assert hugging_face_of(unnormalized).to_json(unnormalized)["norm_topk_prob"] is False
    import_llama(write_model(tmp_path / "hf", random_tensors(MIXTRAL), MIXTRAL), tmp_path / "imported")
    with pytest.raises(ValueError, match=naming("`dtype` 'mxfp8' w1.weight")):
        export_llama(tmp_path / "imported", tmp_path / "out", dtype="mxfp8")
