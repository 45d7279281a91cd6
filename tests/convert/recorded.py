"""Tiny models of which `record` has recorded what transformers computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .hugging_face import GEMMA3, GPT_OSS, PHI3

MODELS = {"gemma3": GEMMA3, "phi3": PHI3, "gpt_oss": GPT_OSS}

# The logits of every 6th token are recorded.
EVERY = 6
PROMPT = [5, 3, 8, 1, 90, 17, 2, 44, 63, 9, 11]
# The number of tokens that follow the prompt.
COUNT = 20


def file_of(name: str) -> Path:
    """The file of a model."""
    return Path(__file__).parent / f"recorded_{name}.npz"


def tokens_of(config: dict) -> np.ndarray:
    """The tokens of which logits are recorded."""
    return np.random.default_rng(1).integers(0, config["vocab_size"], (4, 24), dtype=np.int32)
