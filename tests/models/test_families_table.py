"""A family registers in one table, from which everything else takes it."""

from __future__ import annotations

import dataclasses
import math

import jax
import pytest
from messages import naming

from gtp_jax.models import (
    FAMILIES,
    PRESETS,
    array_shapes,
    build,
    family_of,
    hugging_face_of,
    preset_of,
    saved,
    saved_config,
)
from gtp_jax.nn import abstract_model
from gtp_jax.ops import RopeScaling


def test_every_preset_is_of_a_family_and_says_enough_of_itself_to_be_made_again():
    assert {name for family in FAMILIES for name in family.presets} == set(PRESETS)
    for config in PRESETS.values():
        again = saved_config(saved(config))
        assert family_of(again) is family_of(config)
        assert again.architecture() == config.architecture()


def test_a_saved_model_is_its_configuration_whose_family_is_llama_by_default():
    config = dataclasses.replace(preset_of("tiny"), num_experts=4, top_k=2)
    assert saved_config(saved(config)) == saved_config({"model": config.architecture()})
    assert saved_config(saved(config)).architecture() == config.architecture()
    for call, message in (
        (lambda: saved_config({"family": "Bert", "model": {}}), "'Bert' Llama"),
        (lambda: saved_config({"model": "tiny"}), "'tiny' dict"),
        (lambda: family_of(3), "`config` 3 LlamaConfig"),
    ):
        with pytest.raises(TypeError, match=naming(message)):
            call()


def test_presets_have_the_parameters_of_what_was_published():
    counts = {name: preset_of(name).param_count() for name in ("phi4", "gemma3-1b", "gpt-oss-20b")}
    assert counts == {"phi4": 14_659_507_200, "gemma3-1b": 999_885_952, "gpt-oss-20b": 20_914_757_184}


QWEN2 = dataclasses.replace(PRESETS["tiny"], qkv_bias=True, window=64)  # pyright: ignore[reportArgumentType]

GEMMA3 = dataclasses.replace(
    PRESETS["tiny"],
    **dict(qk_norm=True, norm="zero_centered_rms", branch_norms=True, activation="gelu_tanh", scale_embedding=True),
    **dict(window=64, full_every=2, window_rope_theta=1e4),
)
GPT_OSS = dataclasses.replace(
    PRESETS["tiny-moe"],
    **dict(qkv_bias=True, out_bias=True, sinks=True, expert_biases=True, swiglu_limit=7.0, window=64, full_every=2),
    rope_scaling=RopeScaling(kind="yarn", factor=32.0, original_length=4096, truncate=False),
)


@pytest.mark.parametrize("config", ["tiny", "8b", "mixtral", "qwen3-30b-a3b", QWEN2, GEMMA3, GPT_OSS])
def test_the_tensors_of_hugging_face_are_all_parameters_of_the_model(config):
    config = preset_of(config) if isinstance(config, str) else config
    tensors = hugging_face_of(config).tensors(config)
    model = abstract_model(lambda rngs: build(config, rngs=rngs))
    assert sum(math.prod(tensor.shape) for tensor in tensors) == config.param_count()
    assert len(array_shapes(tensors)) == len(jax.tree.leaves(model))
