"""Llama, Mistral, Qwen2 and Qwen3: what config.json says of biases, windows and YaRN is computed, and comes back."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from messages import naming
from selection import every, others_full

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.convert import export_llama, import_llama
from gtp_jax.convert._config import read_config, write_config
from gtp_jax.convert._encoding import ENCODINGS
from gtp_jax.models import LlamaConfig, hugging_face_of, load
from gtp_jax.ops import RopeScaling, rope

from .hugging_face import (
    CONFIG,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    QWEN3_MOE,
    assert_same,
    logits,
    random_tensors,
    read_model,
    write_model,
)

# of so short a sequence every kind of frequency must turn
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
WINDOW = {"sliding_window": 5, "use_sliding_window": True}
QWEN3 = {**QWEN2, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
MODELS = {
    "Llama": CONFIG,
    "Llama, linear scaling": {**CONFIG, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "Llama 3.1's scaling": {**CONFIG, "rope_theta": 100.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "Qwen2": QWEN2,
    "Qwen2, YaRN, a window, tied": {
        **{**QWEN2, "rope_theta": 100.0, "rope_scaling": YARN, "tie_word_embeddings": True},
        **{**WINDOW, "max_window_layers": 0, "layer_types": ["sliding_attention"] * 3},
    },
    "Mistral": MISTRAL,
    "Mistral without a window": {**MISTRAL, "sliding_window": None},
    "Mixtral with a window": {**MIXTRAL, "sliding_window": 7},
    "Qwen3 with a window": {**QWEN3, **WINDOW, "max_window_layers": 0},
    "Qwen3 with experts and a window": {**QWEN3_MOE, **WINDOW},
}
USUAL = ["Qwen2, YaRN, a window, tied"]


@pytest.fixture(params=others_full(MODELS, USUAL))
def model(request, tmp_path):
    """A config.json, its tensors, and the checkpoint that was imported."""
    config = MODELS[request.param]
    tensors = random_tensors(config)
    import_llama(write_model(tmp_path / "hf", tensors, config), tmp_path / "imported")
    return config, tensors, tmp_path / "imported"


def test_logits_on_a_mesh_are_those_of_the_tensors(model, x64):
    config, tensors, imported = model
    tokens = np.random.default_rng(1).integers(0, config["vocab_size"], (8, 24), dtype=np.int32)
    wanted = logits(tensors, config, tokens)
    # each part is seen
    for name, other in (("rope_scaling", None), ("sliding_window", 1000)):
        if config.get(name) and config.get("use_sliding_window", True):
            assert np.abs(logits(tensors, {**config, name: other}, tokens) - wanted).max() > 1e-2
    unbiased = {name: 0 * values if "bias" in name else values for name, values in tensors.items()}
    has_biases = np.abs(logits(unbiased, config, tokens) - wanted).max() > 1e-2
    assert has_biases == (config["model_type"] == "qwen2")
    mesh = gtp.make_mesh(gtp=4, tp=2)
    with jax.set_mesh(mesh):
        placed = jax.device_put(tokens, NamedSharding(mesh, P(("dp", "gtp"))))
        found = nnx.jit(lambda model, tokens: model(tokens))(load(imported, dtype="float64"), placed)
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=0, atol=1e-11)


def test_tensors_and_config_come_back_as_the_same_kind_and_again(model, tmp_path):
    config, tensors, imported = model
    done = export_llama(imported, tmp_path / "out", dtype="float32")
    assert_same(read_model(tmp_path / "out"), tensors)
    assert done.tensors == len(tensors)
    assert json.loads((tmp_path / "out/config.json").read_text()) == {**config, "torch_dtype": "float32"}
    again = import_llama(tmp_path / "out", tmp_path / "again").config
    leaves = [
        {name: leaf["digest"] for name, leaf in Checkpoints(path, read_only=True).manifest()["leaves"].items()}
        for path in (imported, tmp_path / "again")
    ]
    assert leaves[0] == leaves[1]
    # a config.json that is written anew says the same
    layout = hugging_face_of(again, config["model_type"])
    assert layout.architecture == config["architectures"][0]
    assert layout.from_json(json.loads(json.dumps(layout.to_json(again))), "config.json") == again


@pytest.mark.parametrize("fields", [{}, {"max_position_embeddings": 64}], ids=["none given", "those before YaRN"])
def test_yarn_is_exported_with_the_positions_from_which_transformers_4_computes_its_factor(fields, tmp_path):
    plain = {name: value for name, value in QWEN2.items() if name != "max_position_embeddings"} | fields
    config = {**plain, "rope_scaling": YARN}
    import_llama(write_model(tmp_path / "hf", random_tensors(config), config), tmp_path / "imported")
    export_llama(tmp_path / "imported", tmp_path / "out")
    found = json.loads((tmp_path / "out/config.json").read_text())
    assert found == {**config, "torch_dtype": "bfloat16", "max_position_embeddings": 256, **fields}
    scaling = RopeScaling(kind="yarn", factor=4, original_length=64)
    scaled = dataclasses.replace(config_of(tmp_path / "plain", QWEN2), rope_scaling=scaling)
    write_config(tmp_path, scaled, ENCODINGS["float32"], plain, None)
    assert json.loads((tmp_path / "config.json").read_text())["max_position_embeddings"] == 256


TABLE = json.loads((Path(__file__).parent / "yarn_of_transformers.json").read_text())


def config_of(folder, config, **fields) -> LlamaConfig:
    """The configuration of a config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    found = read_config(folder)[0]
    assert isinstance(found, LlamaConfig)
    return found


@pytest.mark.parametrize("name", every(4, TABLE["cases"]))
def test_yarn_has_the_frequencies_and_the_factor_of_transformers(name, tmp_path, x64):
    case = TABLE["cases"][name]
    fields = {"rope_type": "yarn", "rope_theta": case["rope_theta"], **case["scaling"]}
    theirs = {**QWEN2, "rope_theta": None, "max_position_embeddings": 4096, "head_dim": case["head_dim"]}
    config = config_of(tmp_path, theirs, rope_parameters=fields)
    half = case["head_dim"] // 2
    x = jnp.concatenate([jnp.ones(half), jnp.zeros(half)])[None, None, None]
    turn = {"theta": config.rope_theta, "scaling": config.rope_scaling, "positions": jnp.ones(1)}
    cos, sin = np.split(np.asarray(rope(x, **turn))[0, 0, 0], 2)
    np.testing.assert_allclose(np.hypot(cos, sin), case["attention_factor"], rtol=1e-12)
    np.testing.assert_allclose(np.arctan2(sin, cos), case["frequencies"], rtol=1e-6)


TYPES = ["full_attention", "sliding_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (QWEN2, {**WINDOW, "max_window_layers": 2}, "max_window_layers 2 3 layers 0 use_sliding_window false"),
        (QWEN3_MOE, {**WINDOW, "max_window_layers": 48}, "max_window_layers 48 2 layers"),
        (QWEN2, {**WINDOW, "layer_types": TYPES}, f"layer_types {TYPES} 5 sliding_window 3 layers null"),
        (QWEN2, {"layer_types": TYPES[1:] + TYPES[1:2]}, "no sliding_window 'full_attention'"),
        (QWEN2, {**WINDOW, "layer_types": TYPES[1:]}, "'sliding_attention' 3 layers"),
        (QWEN2, {"use_sliding_window": "no"}, "use_sliding_window 'no' true false"),
        (MISTRAL, {"sliding_window": 0}, "sliding_window 0 2**31 null"),
        (MISTRAL, {"sliding_window": 7.0}, "sliding_window 7.0"),
        (QWEN2, {"rope_scaling": {**YARN, "factor": None}}, "rope_scaling 'yarn' factor"),
        (QWEN2, {"rope_scaling": {**YARN, "beta_fast": "32"}}, "'yarn' beta_fast '32'"),
        (QWEN2, {"rope_scaling": {**YARN, "beta_slow": 32}}, "`beta_slow` 32 `beta_fast`"),
        (QWEN2, {"rope_scaling": YARN, "rope_theta": 1.0}, "`rope_theta` 1.0 'yarn'"),
        (
            QWEN2,
            {"rope_scaling": YARN, "original_max_position_embeddings": 32},
            "original_max_position_embeddings 32 rope_scaling.original_max_position_embeddings 64",
        ),
    ],
)
def test_windows_and_scalings_that_are_not_computed_are_refused(config, fields, message, tmp_path):
    with pytest.raises(ValueError, match=naming(message)):
        config_of(tmp_path / "hf", config, **fields)


def test_windows_that_are_left_out_are_those_of_transformers(tmp_path):
    def without(config, name):
        return {key: value for key, value in config.items() if key != name}

    for wanted, config, fields in (
        (4096, without(MISTRAL, "sliding_window"), {}),
        (None, MISTRAL, {"sliding_window": None}),
        (None, MIXTRAL, {}),
        (None, QWEN2, {}),
        (None, QWEN2, {"use_sliding_window": None}),
        (None, QWEN2, {"use_sliding_window": True}),  # from layer 28 on
        (5, QWEN2, {**WINDOW, "max_window_layers": 0}),
        (None, without(QWEN2, "max_window_layers"), WINDOW),  # transformers' default is layer 28
        (None, QWEN3, WINDOW),
        (5, QWEN3_MOE, WINDOW),  # which has no such field
        (None, CONFIG, {"sliding_window": 5}),  # which transformers' Llama does not read
    ):
        assert config_of(tmp_path, config, **fields).window == wanted


def test_heads_that_are_left_out_are_those_of_transformers(tmp_path):
    without = {name: value for name, value in MISTRAL.items() if name != "num_key_value_heads"}
    assert config_of(tmp_path, without, num_attention_heads=16).num_kv_heads == 8
    assert config_of(tmp_path, MISTRAL, num_attention_heads=16, num_key_value_heads=None).num_kv_heads == 16


def test_an_export_with_another_window_says_so_in_every_field(tmp_path):
    config = MODELS["Qwen2, YaRN, a window, tied"]
    done = import_llama(write_model(tmp_path / "hf", random_tensors(config), config), tmp_path / "imported")
    other = dataclasses.replace(done.config, window=None)  # pyright: ignore[reportArgumentType]
    export_llama(tmp_path / "imported", tmp_path / "out", config=other)
    assert read_config(tmp_path / "out")[0] == other
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["layer_types"] == ["full_attention"] * 3 and written["use_sliding_window"] is False
