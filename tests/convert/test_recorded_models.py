"""Kinds of models of which transformers' results are recorded: logits, greedy tokens, training and the way back."""

import dataclasses
import json

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from messages import naming
from selection import others_full

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.convert import export_llama, export_peft, import_llama
from gtp_jax.convert._config import read_config
from gtp_jax.models import Adapters, LlamaConfig, hugging_face_of, load, next_token_loss, saved
from gtp_jax.models.llama._hf_config import rotary_part
from gtp_jax.ops import RopeScaling

from .hugging_face import assert_same, random_tensors, read_model, write_model
from .recorded import COUNT, EVERY, MODELS, PROMPT, file_of, tokens_of


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    """A config.json, its tensors, the checkpoint that was imported, and what transformers computes."""
    config, folder = MODELS[request.param], tmp_path_factory.mktemp(request.param)
    tensors = random_tensors(config)
    done = import_llama(write_model(folder / "hf", tensors, config), folder / "imported")
    return config, tensors, folder / "imported", done.config, np.load(file_of(request.param))


@pytest.mark.parametrize("model", others_full(MODELS, ["gpt_oss"]), indirect=True)
def test_logits_and_greedy_tokens_on_a_mesh_are_those_of_transformers(model):
    config, _, imported, _, recorded = model
    mesh = gtp.make_mesh(gtp=4, tp=2)
    with jax.set_mesh(mesh):
        ours = load(imported, dtype="float32")
        placed = jax.device_put(tokens_of(config), NamedSharding(mesh, P(("dp", "gtp"))))
        found = np.asarray(nnx.jit(lambda model, tokens: model(tokens))(ours, placed))[:, ::EVERY]
        tokens = gtp.generation.generate(ours, [PROMPT, PROMPT[:3]], max_new_tokens=COUNT).tokens
    largest = np.abs(recorded["logits"]).max()
    np.testing.assert_allclose(found, recorded["logits"], rtol=0, atol=1e-5 * largest)
    assert tokens[0].tolist() == recorded["greedy"].tolist()


@pytest.mark.full
def test_a_step_on_a_mesh_is_that_without_one(model):
    config, _, imported, _, _ = model
    tokens = tokens_of(config)
    batch = {"tokens": tokens, "targets": np.roll(tokens, -1, axis=1)}
    after = []
    for degrees in ({"devices": jax.devices()[:1]}, {"gtp": 2, "tp": 2, "dp": 2}):
        with jax.set_mesh(gtp.make_mesh(**degrees)):
            state = gtp.TrainState.create(load(imported, dtype="float32"), optimizer := optax.sgd(0.5))
            state, metrics = gtp.train_step(next_token_loss, optimizer)(state, batch)
            after.append((metrics["loss"], jax.tree.map(np.asarray, state.logical().params)))
    np.testing.assert_allclose(after[0][0], after[1][0], rtol=1e-5)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=0, atol=2e-5), after[0][1], after[1][1])


def test_tensors_and_config_come_back_as_the_same_kind(model, tmp_path):
    config, tensors, imported, ours, _ = model
    export_llama(imported, tmp_path / "out", dtype="float32")
    assert_same(read_model(tmp_path / "out"), tensors)
    assert json.loads((tmp_path / "out/config.json").read_text()) == {**config, "torch_dtype": "float32"}
    layout = hugging_face_of(ours, config["model_type"])
    assert layout.architecture == config["architectures"][0]
    assert layout.from_json(json.loads(json.dumps(layout.to_json(ours))), "config.json") == ours


def config_of(folder, config, **fields) -> LlamaConfig:
    """The configuration of a config.json; a field that is `...` is left out."""
    content = {name: value for name, value in {**config, **fields}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(content))
    found = read_config(folder)[0]
    assert isinstance(found, LlamaConfig)
    return found


ROTARY = {"full_attention": {"rope_theta": 1e5}, "sliding_attention": {"rope_theta": 1e3, "rope_type": "default"}}
WITHOUT = dict(rope_theta=..., rope_local_base_freq=..., rope_scaling=...)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(attn_logit_softcapping=50.0), "attn_logit_softcapping 50.0 None soft cap"),
        (dict(final_logit_softcapping=30.0), "final_logit_softcapping 30.0 None soft cap"),
        (dict(use_bidirectional_attention=True), "use_bidirectional_attention True False"),
        (dict(hidden_activation="silu"), "hidden_activation 'silu' 'gelu_pytorch_tanh'"),
        (dict(query_pre_attn_scalar=2.5), "query_pre_attn_scalar 2.5 whole"),
        (dict(layer_types=["full_attention"] + ["sliding_attention"] * 3), "layer_types full_attention every n-th"),
        (dict(layer_types=["full_attention"]), "layer_types 4 layers"),
        (dict(layer_types="sliding_attention"), "layer_types 'sliding_attention' 4 layers"),
        (dict(layer_types=None, sliding_window_pattern=0.5), "sliding_window_pattern 0.5 whole"),
        (dict(sliding_window=None), "sliding_window null number"),
        (dict(**WITHOUT, rope_parameters={"rope_theta": 1e4}), "rope_parameters sliding_attention full_attention"),
        (
            dict(**WITHOUT, rope_parameters={**ROTARY, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}),
            "'linear' rope_parameters.sliding_attention rope_theta",
        ),
        (
            dict(rope_parameters=ROTARY, rope_theta=..., rope_scaling=...),
            "rope_local_base_freq 20.0 rope_parameters.sliding_attention.rope_theta 1000.0",
        ),
    ],
)
def test_what_gemma_3_may_have_and_our_model_has_not_is_refused(fields, message, tmp_path):
    with pytest.raises(ValueError, match=naming(message)):
        config_of(tmp_path, MODELS["gemma3"], **fields)


def test_what_gemma_3_leaves_out_is_that_of_transformers(tmp_path):
    names = ("layer_types", "rope_theta", "rope_local_base_freq", "rope_scaling", "sliding_window", "head_dim")
    names = (*names, "query_pre_attn_scalar", "tie_word_embeddings", "num_key_value_heads")
    found = config_of(tmp_path, MODELS["gemma3"], **dict.fromkeys(names, ...), num_hidden_layers=7)
    assert (found.window, found.full_every, found.head_dim, found.query_pre_attn_scalar) == (4096, 6, 256, None)
    assert (found.rope_theta, found.window_rope_theta, found.rope_scaling) == (1e6, 1e4, None)
    assert found.tie_embeddings and found.num_kv_heads == 4
    assert [reach.window for reach in found.reaches] == [4096] * 5 + [None, 4096]
    of_5 = config_of(tmp_path, MODELS["gemma3"], **WITHOUT, rope_parameters=ROTARY)
    assert (of_5.rope_theta, of_5.window_rope_theta) == (1e5, 1e3)
    without = config_of(tmp_path, MODELS["gemma3"], layer_types=["full_attention"] * 4)
    assert (without.window, without.full_every, without.window_rope_theta) == (None, None, None)
    whole = config_of(tmp_path, MODELS["gemma3"], layer_types=["sliding_attention"] * 4)
    assert (whole.window, whole.full_every) == (5, None)
    for config in (found, of_5, without, whole):
        layout = hugging_face_of(config)
        content = layout.to_json(config)
        assert config_of(tmp_path, {"model_type": layout.model_type, **content}) == config
        assert content["sliding_window"] == (config.window or 4096), "transformers reads it even without a window"


def test_a_scaling_that_transformers_has_not_for_phi_3_or_ours_has_not_is_refused(tmp_path):
    for kind in ("longrope", "yarn", "su"):
        with pytest.raises(ValueError, match=naming(f"rope_scaling '{kind}' none 'phi3'")):
            config_of(tmp_path, MODELS["phi3"], rope_scaling={"type": kind, "factor": 4.0})


def test_the_rotated_part_of_a_head_comes_back(tmp_path):
    found = config_of(tmp_path, MODELS["phi3"])
    assert (found.rotary_dim, found.window) == (12, 7)
    assert config_of(tmp_path, MODELS["phi3"], partial_rotary_factor=..., sliding_window=...).rotary_dim is None
    of_5 = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.75}
    assert config_of(tmp_path, MODELS["phi3"], partial_rotary_factor=..., rope_parameters=of_5) == found
    assert all(int(head * rotary_part(dims, head)) == dims for head in range(2, 257) for dims in range(2, head + 1, 2))


@pytest.mark.full
def test_tensors_that_are_stored_together_are_quantized_together_and_come_back(tmp_path):
    config = MODELS["phi3"]
    import_llama(write_model(tmp_path / "hf", random_tensors(config), config), tmp_path / "imported")
    export_llama(tmp_path / "imported", tmp_path / "out", dtype="nvfp4")
    written = read_model(tmp_path / "out")
    assert written["model.layers.0.self_attn.qkv_proj.weight_scale"].shape == (128, 4)
    import_llama(tmp_path / "out", tmp_path / "again")
    export_llama(tmp_path / "again", tmp_path / "once more", dtype="nvfp4")
    assert_same(read_model(tmp_path / "once more"), written)


def test_what_gpt_oss_leaves_out_is_that_of_transformers(tmp_path):
    names = ("layer_types", "rope_theta", "rope_scaling", "sliding_window", "head_dim", "num_key_value_heads")
    names = (*names, "num_experts_per_tok", "swiglu_limit", "attention_bias")
    found = config_of(tmp_path, MODELS["gpt_oss"], **dict.fromkeys(names, ...), num_attention_heads=64)
    assert (found.window, found.full_every, found.head_dim, found.num_kv_heads) == (128, 2, 64, 8)
    assert (found.rope_theta, found.top_k, found.swiglu_limit, found.swiglu_alpha) == (150_000.0, 4, 7.0, 1.702)
    assert found.rope_scaling == RopeScaling(kind="yarn", factor=32.0, original_length=4096, truncate=False)
    assert [reach.window for reach in found.reaches] == [128, None, 128]
    for fields, message in (
        (dict(attention_bias=False), "attention_bias False True"),
        (dict(swiglu_limit=0), "`swiglu_limit` 0 above 0"),
        (dict(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "'dynamic' yarn 'gpt_oss'"),
    ):
        with pytest.raises(ValueError, match=naming(message)):
            config_of(tmp_path, MODELS["gpt_oss"], **fields)
    unscaled = dataclasses.replace(found, rope_scaling=None)
    with pytest.raises(ValueError, match=naming("GptOssForCausalLM only ones converted")):
        hugging_face_of(unscaled)  # transformers would scale by its default


@pytest.mark.full
def test_adapters_of_a_tensor_that_is_stored_with_others_are_refused(tmp_path):
    config = MODELS["phi3"]
    done = import_llama(write_model(tmp_path / "hf", random_tensors(config), config), tmp_path / "imported")
    adapters = Adapters(2, 4.0, ("query",))
    with jax.set_mesh(gtp.make_mesh(devices=jax.devices()[:1])), Checkpoints(tmp_path / "run") as checkpoints:
        model = adapters.on(load(tmp_path / "imported", dtype="float32"), nnx.Rngs(0))
        state = gtp.TrainState.create(model, optax.sgd(0.1))
        checkpoints.save(1, state, {**saved(done.config), **adapters.extra()})
    with pytest.raises(ValueError, match=naming("qkv/kernel/query 'phi3' qkv_proj.weight `gtp-jax convert merge`")):
        export_peft(tmp_path / "run", tmp_path / "adapter")
