"""The model and the mesh of commands that only compile or compute, for command lines."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ..._words import PRESET_NAMES
from ._expert_options import ExpertOptions
from ._knobs import knob, piece
from ._model_sizes import ModelSizes
from ._parallelism import Parallelism

if TYPE_CHECKING:
    from ...models import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A preset, and what options change in it. `gtp-jax inspect --help-all` shows the help of each field."""

    preset: str = knob("tiny", "model", f"one of {', '.join(PRESET_NAMES)}", kind=str)
    sizes: ModelSizes = piece(ModelSizes)
    experts: ExpertOptions = piece(ExpertOptions)

    @property
    def model(self) -> ModelConfig:
        """The configuration of the preset, with the sizes and experts that the options change.

        Raises:
            ValueError: if sizes and experts do not fit together.
        """
        from ...models import preset_of

        return self.sizes.of(preset_of(self.preset), self.preset, self.experts)

    @property
    def title(self) -> str:
        """The name of the model in headings."""
        return " ".join([self.preset, *self.sizes.flags, *self.experts.flags()])


@dataclasses.dataclass(frozen=True, kw_only=True)
class PresetOptions(ModelOptions):
    """A model and a mesh."""

    parallelism: Parallelism = piece(Parallelism)
