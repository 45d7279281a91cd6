"""Tiny models of transformers with random weights, written as its users write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

torch.set_num_threads(1)  # the products are tiny

_SIZES: dict[str, Any] = dict(
    vocab_size=101,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=96,
    max_position_embeddings=256,
    bos_token_id=None,
    eos_token_id=None,
)
# what is turned, and how often, must show in sequences of 48
_THETA = {"rope_theta": 100.0}
_LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **_THETA)
_YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, **_THETA)
_EXPERTS = dict(num_experts_per_tok=2)

# The class of the configuration, and its arguments.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3": ("Llama", dict(rope_parameters={**_LLAMA3, "original_max_position_embeddings": 32})),
    "Qwen2": ("Qwen2", dict(tie_word_embeddings=True)),
    "Qwen2 with YaRN": ("Qwen2", dict(rope_parameters=_YARN)),
    "Qwen2 with YaRN of every field": (
        "Qwen2",
        dict(
            rope_parameters=dict(**_YARN, beta_fast=16.0, beta_slow=2.0, mscale=0.7, mscale_all_dim=0.4, truncate=False)
        ),
    ),
    "Qwen2 with a window": ("Qwen2", dict(use_sliding_window=True, sliding_window=9, max_window_layers=0)),
    "Qwen3": ("Qwen3", {}),
    "Qwen3 with experts": (
        "Qwen3Moe",
        dict(**_EXPERTS, num_experts=4, moe_intermediate_size=48, norm_topk_prob=False, router_aux_loss_coef=0.0),
    ),
    "Mixtral": ("Mixtral", dict(**_EXPERTS, num_local_experts=4)),
    "Mistral with a window": ("Mistral", dict(sliding_window=9)),
    "Gemma 3": (
        "Gemma3Text",
        dict(
            **dict(num_hidden_layers=4, sliding_window=9, query_pre_attn_scalar=24),
            layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", factor=4.0, **_THETA),
                sliding_attention=dict(rope_type="default", rope_theta=20.0),
            ),
        ),
    ),
    "Phi-3": ("Phi3", dict(partial_rotary_factor=0.75, sliding_window=9, pad_token_id=None)),
    "gpt-oss": (
        "GptOss",
        dict(
            **dict(**_EXPERTS, num_local_experts=4, sliding_window=9, num_hidden_layers=3, router_aux_loss_coef=0.0),
            rope_parameters=dict(**_YARN, truncate=False),
        ),
    ),
    "Mistral without a window": ("Mistral", dict(sliding_window=None)),
}


def random_model(name: str) -> transformers.PreTrainedModel:
    """A model of `MODELS`, with random weights."""
    kind, fields = MODELS[name]
    return drawn(kind, {**_SIZES, **fields})


def drawn(kind: str, fields: dict[str, Any]) -> transformers.PreTrainedModel:
    """A model on the CPU in float32, none of whose weights is what a fresh model has.

    Args:
        kind: the class of its configuration, without `Config`.
        fields: the arguments of its configuration.
    """
    config = getattr(transformers, f"{kind}Config")(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            drawn = torch.from_numpy(rng.standard_normal(tuple(weight.shape)).astype(np.float32))
            if "norm" in path:
                drawn = weight + 0.1 * drawn  # of a fresh model, which scales by one
            elif "embed" not in path and "bias" not in path:
                drawn = drawn / weight.shape[-1] ** 0.5
            weight.copy_(drawn)
    return model


def read_model(folder: Path) -> transformers.PreTrainedModel:
    """A folder's model in float32, all of whose weights are in its files, and no others."""
    model, said = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(said.values()), said
    return model.eval()


def logits(model: transformers.PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """What a model computes of tokens."""
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.numpy()


def greedy(model: transformers.PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """The tokens that transformers generates."""
    found = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=count, pad_token_id=0)
    return found[0, len(prompt) :].tolist()
