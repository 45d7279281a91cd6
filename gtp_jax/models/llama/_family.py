"""Defines Llama as a family of models."""

from __future__ import annotations

import functools

from .._family import Family, HuggingFace
from ._config import LlamaConfig
from ._hf_config import from_json, to_json
from ._hf_kinds import KINDS
from ._hf_names import copies, tensors
from ._model import Llama, LlamaBlock, next_token_loss
from ._presets import PRESETS

LLAMA = Family(
    name="Llama",
    config=LlamaConfig,
    model=Llama,
    block=LlamaBlock,
    loss=next_token_loss,
    presets=PRESETS,
    hugging_face=tuple(
        HuggingFace(
            model_type=kind.model_type,
            architecture=kind.architecture,
            tensors=functools.partial(tensors, kind.model_type),
            copies=copies,
            to_json=functools.partial(to_json, kind),
            from_json=functools.partial(from_json, kind),
            fits=kind.fits,
        )
        for kind in KINDS
    ),
)
