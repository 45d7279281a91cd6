"""Options of a plan of memory, for command lines."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ..._words import GPUS_PER_HOST, PRESET_NAMES
from ._expert_options import ExpertOptions
from ._knobs import check_knobs, knob, piece
from ._model_sizes import ModelSizes
from ._parallelism import Parallelism

if TYPE_CHECKING:
    from ... import hlo
    from ...models import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """The options of a plan of memory. `gtp-jax plan-memory --help` shows the help of each field.

    Raises:
        ValueError: if a value is not allowed, or values do not fit together.
    """

    preset: str = knob("tiny", "model", f"one of {', '.join(PRESET_NAMES)}", kind=str)
    target: str = knob("h200:1", "target", "the GPUs, which need not be present", kind=str, metavar="CHIP:DEVICES")
    gpus_per_host: int = knob(GPUS_PER_HOST, "target", "number of GPUs per host", metavar="N")
    parallelism: Parallelism = piece(Parallelism)
    sizes: ModelSizes = piece(ModelSizes)
    experts: ExpertOptions = piece(ExpertOptions)

    def __post_init__(self) -> None:
        check_knobs(self)
        self.machine  # noqa: B018  checks the target
        self.model  # noqa: B018  checks that sizes and experts fit together

    @property
    def model(self) -> ModelConfig:
        """The configuration of the preset, with the sizes and experts that the options change."""
        from ...models import preset_of

        return self.sizes.of(preset_of(self.preset), self.preset, self.experts)

    @property
    def machine(self) -> hlo.Target:
        """The GPUs.

        Raises:
            ValueError: if `target` does not name any.
        """
        from ... import hlo

        return hlo.parse_target(self.target, self.gpus_per_host)

    @property
    def title(self) -> str:
        """The name of the model in headings."""
        return " ".join([self.preset, *self.sizes.flags])
