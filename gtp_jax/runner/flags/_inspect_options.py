"""Options of an inspection, for command lines."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ..._words import GPUS_PER_HOST
from ._execution import Execution
from ._knobs import check_knobs, knob, piece
from ._preset_options import PresetOptions
from ._quantization import Quantization

if TYPE_CHECKING:
    from ... import hlo


@dataclasses.dataclass(frozen=True, kw_only=True)
class InspectOptions(PresetOptions):
    """The options of an inspection. `gtp-jax inspect --help` shows the help of each field.

    Raises:
        ValueError: if a value is not allowed, or values do not fit together.
    """

    seq: int = knob(2048, "model", "tokens per sequence")
    batch: int | None = knob(None, "model", "sequences per step (default: one per rank and microbatch)")
    execution: Execution = piece(Execution)
    quantization: Quantization = piece(Quantization)
    target: str | None = knob(
        None,
        "target",
        "compile for GPUs that need not be present, e.g. h200:8 (default: virtual CPU devices)",
        kind=str,
        metavar="CHIP:DEVICES",
    )
    network_rate: float | None = knob(
        None,
        "target",
        "rate in GB/s at which each GPU sends to other hosts, such as 50 for a network adapter of 400 Gbit/s per GPU; "
        "the schedule is then modelled twice, over NVLink alone and with this network (default: NVLink joins all GPUs)",
        kind=float,
        above=0,
        metavar="X",
    )
    gpus_per_host: int = knob(
        GPUS_PER_HOST,
        "target",
        "number of GPUs per host, which NVLink joins; consecutive ranks, with tp innermost, share a host",
        metavar="N",
    )

    def __post_init__(self) -> None:
        check_knobs(self)
        for name, default in (("network_rate", None), ("gpus_per_host", GPUS_PER_HOST)):
            if self.target is None and getattr(self, name) != default:
                raise ValueError(
                    f"`{name}` is {getattr(self, name)}, but there is no target, and only the schedule of a GPU "
                    "program is modelled: give `--target`, such as `h200:512`."
                )
        self.model  # noqa: B018  checks that sizes and experts fit together

    @property
    def machine(self) -> hlo.Target | None:
        """The machine to compile for; `None` for virtual CPU devices.

        Raises:
            ValueError: if `target` does not name one.
        """
        from ... import hlo

        return None if self.target is None else hlo.parse_target(self.target, self.gpus_per_host)

    @property
    def network(self) -> hlo.Network | None:
        """The links between hosts; `None` if the options do not describe them."""
        from ... import hlo

        rate = self.network_rate
        return None if rate is None else hlo.Network(rate * 1e9, self.gpus_per_host)
