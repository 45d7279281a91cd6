"""Llama as a family."""

from __future__ import annotations

from .._family import Family, HuggingFace
from ._config import LlamaConfig
from ._hf_config import ARCHITECTURE, MODEL_TYPE, from_json, to_json
from ._hf_names import tensors
from ._model import Llama, LlamaBlock, next_token_loss
from ._presets import PRESETS

LLAMA = Family(
    name="Llama",
    config=LlamaConfig,
    model=Llama,
    block=LlamaBlock,
    loss=next_token_loss,
    presets=PRESETS,
    hugging_face=HuggingFace(
        model_type=MODEL_TYPE, architecture=ARCHITECTURE, tensors=tensors, to_json=to_json, from_json=from_json
    ),
)
