"""The result of a conversion."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ..models import ModelConfig


@dataclasses.dataclass(frozen=True)
class Converted:
    """A model that was imported or exported.

    Attributes:
        config: sizes of the model.
        step: of our checkpoint.
        files: Hugging Face's files with tensors, those read or those written.
        tensors: how many tensors they hold, scales included.
        nbytes: of these tensors.
        others: names of the tokenizer's and other files that were stored or written, unchanged, beside config.json.
    """

    config: ModelConfig
    step: int
    files: tuple[Path, ...]
    tensors: int
    nbytes: int
    others: tuple[str, ...] = ()
