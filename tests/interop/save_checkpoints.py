"""Writes the checkpoints in tests/elsewhere/checkpoints, each with what transformers computes of it in float32:

    PYTHONPATH=tests DIR/bin/python -m interop.save_checkpoints tests/elsewhere/checkpoints

where `tests/interop/environment.sh DIR` has made DIR. Every size divides by 8 or by the number of ranks of tp, and rope
theta is 1e6, which two of Tunix's models assume.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .models import drawn

_SIZES: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=64,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
_COMMON = dict(**_SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
_KINDS = ("sliding_attention",) * 5 + ("full_attention",)
# The class of the configuration, and its arguments, by the folder.
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("Llama", dict(**_COMMON, tie_word_embeddings=False)),
    "qwen2": ("Qwen2", dict(**_COMMON, tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(**_COMMON, tie_word_embeddings=True)),
    "qwen3_experts": (
        "Qwen3Moe",
        dict(**_COMMON, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True),
    ),
    "gemma3": (
        "Gemma3Text",
        dict(
            **{**_SIZES, "num_hidden_layers": len(_KINDS)},
            layer_types=list(_KINDS),
            sliding_window=4,
            query_pre_attn_scalar=16,
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
    ),
}


def inputs() -> dict[str, np.ndarray]:
    """Returns tokens and what of them is no padding, with which the first row begins, `(8, 16)`."""
    mask = np.ones((8, 16), bool)
    mask[0, :3] = False
    tokens = np.random.default_rng(1).integers(1, _SIZES["vocab_size"], mask.shape)
    return {"tokens": np.where(mask, tokens, 0).astype(np.int32), "mask": mask}


def logits(model: Any, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Returns the logits of tokens, zero where they are padding."""
    of_torch = {"input_ids": torch.from_numpy(tokens).long(), "attention_mask": torch.from_numpy(mask).long()}
    positions = torch.from_numpy(np.maximum(mask.cumsum(-1) - 1, 0))
    with torch.no_grad():
        found = model(**of_torch, position_ids=positions).logits.numpy()
    return np.where(mask[..., None], found, 0)


if __name__ == "__main__":
    for name, (kind, fields) in CHECKPOINTS.items():
        folder = Path(sys.argv[1]) / name
        model = drawn(kind, fields)
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink()
        given = inputs()
        np.savez(folder / "logits.npz", **given, logits=logits(model, **given))
