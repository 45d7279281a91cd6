"""Llama, Mistral, Qwen2 and Qwen3: what config.json says of biases, windows and YaRN is computed, and comes back."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from selection import others_full

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
MODELS = {
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
MESHES = {"gtp 8": dict(gtp=8), "gtp 4 x tp 2": dict(gtp=4, tp=2)}
USUAL = ["Qwen2, YaRN, a window, tied", "Mistral", "Mistral without a window"]


@pytest.fixture(params=others_full(MODELS, USUAL))
def model(request, tmp_path):
    """A config.json, its tensors, and the checkpoint that was imported."""
    config = MODELS[request.param]
    tensors = random_tensors(config)
    import_llama(write_model(tmp_path / "hf", tensors, config), tmp_path / "imported")
    return config, tensors, tmp_path / "imported"


def test_logits_are_those_of_the_tensors_on_every_mesh(model, x64):
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
    for degrees in MESHES.values():
        mesh = gtp.make_mesh(**degrees)
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


@pytest.mark.parametrize("name", TABLE["cases"])
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


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (
            QWEN2,
            {**WINDOW, "max_window_layers": 2},
            "has max_window_layers 2 with 3 layers, so the window of 5 tokens would not apply to all layers; 0, or "
            "use_sliding_window false, is expected: gtp_jax's Llama has one window in all layers or in none",
        ),
        (QWEN3_MOE, {**WINDOW, "max_window_layers": 48}, "has max_window_layers 48 with 2 layers"),
        (QWEN2, {**WINDOW, "max_window_layers": "all"}, "has max_window_layers 'all' with 3 layers"),
        (
            QWEN2,
            {**WINDOW, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
            "has layer_types ['full_attention', 'sliding_attention', 'sliding_attention'], but 5 sliding_window is used"
            "; 'sliding_attention' for each of 3 layers, or null, is expected: gtp_jax's Llama has one window in all",
        ),
        (QWEN2, {"layer_types": ["sliding_attention"] * 3}, "but no sliding_window is used; 'full_attention' for each"),
        (QWEN2, {**WINDOW, "layer_types": ["sliding_attention"] * 2}, "'sliding_attention' for each of 3 layers"),
        (QWEN2, {**WINDOW, "layer_types": 5}, "has layer_types 5, but 5 sliding_window is used"),
        (QWEN2, {"use_sliding_window": "no"}, "has use_sliding_window 'no'; true or false is expected"),
        (
            MISTRAL,
            {"sliding_window": 0},
            "has sliding_window 0; a number of tokens, at least 1 and below 2**31, or null",
        ),
        (MISTRAL, {"sliding_window": 7.0}, "has sliding_window 7.0; a number of tokens"),
        (MISTRAL, {"sliding_window": True}, "has sliding_window True; a number of tokens"),
        (MISTRAL, {"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention' for each of 3 layers"),
        (
            QWEN2,
            {"rope_scaling": {**YARN, "factor": None}},
            "has rope_scaling of the type 'yarn' without numbers for fa",
        ),
        (QWEN2, {"rope_scaling": {**YARN, "beta_fast": "32"}}, "'yarn' with beta_fast '32'; truncate must be"),
        (QWEN2, {"rope_scaling": {**YARN, "beta_fast": 1e39}}, "and the others must be numbers from 0 to 3.4"),
        (QWEN2, {"rope_scaling": {**YARN, "truncate": None}}, "'yarn' with truncate None; truncate must be"),
        (
            QWEN2,
            {"rope_scaling": {**YARN, "beta_slow": 32}},
            "`beta_slow` of RopeScaling is 32; it must be below `beta_f",
        ),
        (
            QWEN2,
            {"rope_scaling": {**YARN, "attention_factor": 0}},
            "`attention_factor` of RopeScaling is 0; it must be",
        ),
        (
            QWEN2,
            {"rope_scaling": YARN, "rope_theta": 1.0},
            "`rope_theta` is 1.0; with the scaling 'yarn' it must be above",
        ),
        (
            QWEN2,
            {"rope_scaling": YARN, "original_max_position_embeddings": 32},
            "has original_max_position_embeddings 32 and rope_scaling.original_max_position_embeddings 64, which",
        ),
    ],
)
def test_windows_and_scalings_that_are_not_computed_are_refused(config, fields, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        config_of(tmp_path / "hf", config, **fields)


def test_windows_that_are_left_out_are_those_of_transformers(tmp_path):
    without = {name: value for name, value in MISTRAL.items() if name != "sliding_window"}
    assert config_of(tmp_path, without).window == 4096
    assert config_of(tmp_path, MISTRAL, sliding_window=None).window is None
    assert config_of(tmp_path, MIXTRAL).window is None
    assert config_of(tmp_path, QWEN2).window is None
    assert config_of(tmp_path, QWEN2, use_sliding_window=None).window is None
    assert config_of(tmp_path, QWEN2, use_sliding_window=True).window is None  # from layer 28 on
    assert config_of(tmp_path, QWEN2, **WINDOW, max_window_layers=0).window == 5
    absent = {name: value for name, value in QWEN2.items() if name != "max_window_layers"}
    assert config_of(tmp_path, absent, **WINDOW).window is None  # transformers' default is layer 28
    assert config_of(tmp_path, QWEN3, **WINDOW).window is None
    assert config_of(tmp_path, QWEN3_MOE, **WINDOW).window == 5  # which has no such field
    assert config_of(tmp_path, QWEN3_MOE, **WINDOW).window == 5
    assert config_of(tmp_path, CONFIG, sliding_window=5).window is None  # which transformers' Llama does not read


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
