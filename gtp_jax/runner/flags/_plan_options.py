"""Options of a plan, for command lines."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ..._words import GPUS_PER_HOST, GRAD_REDUCE, GradReduce
from ._free_degrees import FreeDegrees
from ._knobs import check_knobs, knob, piece
from ._preset_options import ModelOptions

if TYPE_CHECKING:
    from ... import hlo


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions(ModelOptions):
    """The options of a plan. `gtp-jax plan --help` shows the help of each field.

    Raises:
        ValueError: if a value is not allowed, or values do not fit together.
    """

    seq: int = knob(8192, "model", "tokens per sequence")
    batch: int | None = knob(None, "model", "sequences per step, over all GPUs (default: one per GPU)")
    degrees: FreeDegrees = piece(FreeDegrees)
    microbatches: int | None = knob(
        None, "execution", "number of parts to divide a rank's sequences into (default: the fewest that fit)"
    )
    grad_reduce: GradReduce = knob(
        "float32", "execution", "how weight gradients are summed, as in training", kind=str, choices=GRAD_REDUCE
    )
    target: str = knob("h200:8", "target", "the GPUs, which need not be present", kind=str, metavar="CHIP:DEVICES")
    gpus_per_host: int = knob(GPUS_PER_HOST, "target", "number of GPUs per host, which NVLink joins", metavar="N")
    network_rate: float = knob(
        50.0, "target", "rate in GB/s at which each GPU sends to other hosts", kind=float, above=0, metavar="X"
    )
    peak: float | None = knob(
        None,
        "target",
        "bf16 TFLOP/s of a GPU by its datasheet, of which matmuls and attention reach the same part as on the chip "
        "that was measured (default: that chip's)",
        kind=float,
        above=0,
        metavar="X",
    )

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

    @property
    def network(self) -> hlo.Network | None:
        """The links between hosts; `None` if there is one host."""
        from ... import hlo

        return hlo.Network(self.network_rate * 1e9, self.gpus_per_host) if self.machine.hosts > 1 else None

    @property
    def sequences(self) -> int:
        """The number of sequences per step."""
        return self.batch or self.machine.devices

    @property
    def faster(self) -> float:
        """How many times as fast as the chip's matmuls and attention are."""
        from ... import hlo

        return 1.0 if self.peak is None else self.peak * 1e12 / hlo.fact(self.machine.chip, "bf16_peak").value
