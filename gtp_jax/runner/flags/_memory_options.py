"""Options of a plan of memory, for command lines."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ..._words import GPUS_PER_HOST
from ._knobs import check_knobs, knob
from ._preset_options import PresetOptions

if TYPE_CHECKING:
    from ... import hlo


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryOptions(PresetOptions):
    """The options of a plan of memory. `gtp-jax plan-memory --help` shows the help of each field.

    Raises:
        ValueError: if a value is not allowed, or values do not fit together.
    """

    target: str = knob("h200:1", "target", "the GPUs, which need not be present", kind=str, metavar="CHIP:DEVICES")
    gpus_per_host: int = knob(GPUS_PER_HOST, "target", "number of GPUs per host", metavar="N")

    def __post_init__(self) -> None:
        check_knobs(self)
        self.machine  # noqa: B018  checks the target
        self.model  # noqa: B018  checks that sizes and experts fit together

    @property
    def machine(self) -> hlo.Target:
        """The GPUs.

        Raises:
            ValueError: if `target` does not name any.
        """
        from ... import hlo

        return hlo.parse_target(self.target, self.gpus_per_host)
