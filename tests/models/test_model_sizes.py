"""Sizes of a model as command lines give them: every one has a flag, and a preset is where they start from."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from messages import naming

from gtp_jax.models import PRESETS, LlamaConfig
from gtp_jax.models.llama._config import _PARTS
from gtp_jax.ops import RopeScaling
from gtp_jax.runner.flags import ExpertOptions, ModelSizes, from_settings, knobs, sizes_of
from gtp_jax.runner.trainer import TrainConfig

NAMES = {knob.name for kind in (ModelSizes, ExpertOptions) for knob in knobs(kind)}


@pytest.mark.parametrize("start, name", list(zip(itertools.cycle(["tiny", "8b-3.1", "qwen3-30b-a3b"]), PRESETS)))
def test_flags_alone_make_every_model_of_any_preset(start, name):
    sizes = sizes_of(PRESETS[name])
    assert sizes.keys() <= NAMES
    base = from_settings(TrainConfig, {"preset": start, **sizes}).base
    assert base.architecture() == PRESETS[name].architecture()


def test_every_field_of_an_architecture_has_a_flag():
    fields = {*PRESETS["qwen3-30b-a3b"].architecture(), *PRESETS["tiny"].architecture()}
    assert {*fields, *_PARTS} - {"routing", "rope_scaling"} <= NAMES
    scaling = {f"rope_scaling_{field.name}" for field in dataclasses.fields(RopeScaling)}
    assert scaling <= NAMES


def test_a_size_that_is_given_is_not_the_presets_and_the_others_are():
    config = from_settings(TrainConfig, {"preset": "100m", "num_layers": 2, "hidden_size": 512, "vocab_size": 300})
    model = config.model(256, dtype="float32")
    assert isinstance(model, LlamaConfig)
    assert (model.num_layers, model.hidden_size, model.vocab_size, model.num_heads) == (2, 512, 300, 16)
    assert config.peak_lr == 0.003 * 0.5
    assert config.title == "100m --vocab-size=300 --hidden-size=512 --num-layers=2"


def base(**sizes) -> LlamaConfig:
    found = from_settings(TrainConfig, sizes).base
    assert isinstance(found, LlamaConfig)
    return found


def test_scaling_of_rotary_frequencies_is_changed_field_by_field_and_left_out():
    assert base(preset="8b-3.1", rope_scaling_factor=32.0).rope_scaling == RopeScaling(kind="llama3", factor=32.0)
    assert base(preset="8b-3.1", rope_scaling_kind="none").rope_scaling is None
    yarn = dict(rope_scaling_kind="yarn", rope_scaling_factor=4.0, rope_scaling_truncate=False)
    assert base(**yarn).rope_scaling == RopeScaling(kind="yarn", factor=4.0, truncate=False)


def test_parts_of_other_families_are_given_and_taken_away():
    given, none = base(window=64, qkv_bias=True), base(window=0, qkv_bias=False)
    assert (given.window, given.qkv_bias, none.window, none.qkv_bias) == (64, True, None, False)
    numbers = dict.fromkeys(("full_every", "window_rope_theta", "query_pre_attn_scalar"), 6)
    assert sizes_of(base(window=64, **numbers)).items() >= {"window": 64, **numbers}.items()
    assert base(**dict.fromkeys(("window", *numbers), 0)) == base()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_heads": 3}, "'tiny'"),
        ({"num_experts": 1}, "`top_k` 2 1 experts"),
        ({"tie_embeddings": "yes"}, "`tie_embeddings` 'yes' true false"),
        ({"rope_scaling_factor": 2.0}, "`rope_scaling_factor` 2.0 not scaled"),
        ({"rope_scaling_kind": "llama3"}, "`rope_scaling_kind` 'llama3' factor"),
        ({"shared_hidden": 8}, "`shared_hidden` 8 'tiny' no experts"),
    ],
)
def test_sizes_that_no_model_has_are_refused(settings, message):
    with pytest.raises(ValueError, match=naming(message)):
        from_settings(TrainConfig, settings)
