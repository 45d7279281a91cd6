"""Options of a plan after failures, for command lines."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ..._words import CHIP_NAMES, GRAD_REDUCE, GRAD_WIRE_NAMES, PRESET_NAMES, GradReduce
from ._faults import Faults
from ._knobs import check_knobs, knob, piece

if TYPE_CHECKING:
    from ...nonuniform import FaultPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultOptions:
    """The options of a plan after failures. `gtp-jax plan-faults --help` shows the help of each field.

    Raises:
        ValueError: if a value is not allowed.
    """

    preset: str = knob("8b", "model", f"one of {', '.join(PRESET_NAMES)}", kind=str)
    dp: int = knob(2, "mesh", "number of replicas of the healthy run", metavar="N")
    gtp: int = knob(1, "mesh", "shards per weight", metavar="N")
    tp: int = knob(4, "mesh", "tensor-parallel degree of a healthy replica", metavar="N")
    shard_optimizer: bool = knob(
        True, "mesh", "also divide master weights and optimizer state over replicas (ZeRO)", kind=bool
    )
    faults: Faults = piece(Faults)
    batch: int = knob(64, "training", "sequences per step, over all replicas", metavar="N")
    microbatches: int = knob(1, "training", "microbatches per step of each replica", metavar="N")
    grad_reduce: GradReduce = knob(
        "float32", "training", "how weight gradients are summed, as in training", kind=str, choices=GRAD_REDUCE
    )
    grad_wire: str | None = knob(
        None,
        "training",
        "format in which weight gradients are exchanged, as in training; transfers after failures use only mxfp8",
        kind=str,
        choices=GRAD_WIRE_NAMES,
    )
    chip: str = knob("h200", "speed", f"chip whose links set the transfer times: {', '.join(CHIP_NAMES)}", kind=str)
    memory: float | None = knob(
        None, "memory", "refuse a plan that needs more memory than this per device", kind=float, above=0, metavar="GB"
    )
    activations: float = knob(
        0.0,
        "memory",
        "other memory that a device of the healthy run needs for its sequences; see `gtp-jax inspect`",
        kind=float,
        metavar="GB",
    )

    def __post_init__(self) -> None:
        check_knobs(self)
        if self.chip not in CHIP_NAMES:
            raise ValueError(f"`chip` is {self.chip!r}; it must be one of {', '.join(CHIP_NAMES)}.")
        from ...models import preset_of

        preset_of(self.preset)

    def plan(self) -> FaultPlan:
        """Returns the plan.

        Raises:
            ValueError: if `plan_faults` refuses the options.
        """
        sizes = {"batch": self.batch, "microbatches": self.microbatches}
        return self.faults.plan(dp=self.dp, gtp=self.gtp, tp=self.tp, **sizes)
