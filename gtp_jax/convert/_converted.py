"""The result of a conversion."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ..models import ModelConfig


@dataclasses.dataclass(frozen=True)
class Converted:
    """A model that was imported or exported.

    Attributes:
        config: the configuration of the model.
        step: the step of our checkpoint.
        files: the Hugging Face files with tensors that were read or written.
        tensors: the number of tensors that were imported or written, including scales.
        nbytes: the size of these tensors in bytes.
        others: the names of the files that were copied unchanged, such as the tokenizer's.
        copies: the names of tensors that were not imported because they equal the one that they are tied to.
        quantized: the layout of quantized weights that were imported; `None` if there were none, and after an export.
        left_out: the names of tensors that were not imported because they scale activations or the key-value cache.
        codes: the paths of the parameters whose codes and scales an import kept, besides their values.
    """

    config: ModelConfig
    step: int
    files: tuple[Path, ...]
    tensors: int
    nbytes: int
    others: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    quantized: str | None = None
    left_out: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()
