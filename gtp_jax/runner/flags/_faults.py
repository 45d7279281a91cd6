"""Options for failed devices and how the remaining ones continue."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from ..._foreign import brief
from ._knobs import as_tuple, check_knobs, knob

if TYPE_CHECKING:
    from ...nonuniform import FaultPlan

# Arguments of `plan_faults` that have another name here.
_ARGUMENTS = {"failed": "failed_devices", "batches": "replica_batches"}


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"is {text!r}; it must be a whole number")
    return int(text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Faults:
    """Which devices have failed, and how the others continue; see `plan_faults`.

    Raises:
        ValueError: if a value is out of range.
    """

    failed_devices: tuple[int, ...] = knob(
        (),
        "failures",
        "positions of lost devices in the healthy dp x gtp x tp grid, row by row, from 0; their replicas continue at a "
        "lower tp; with no number: clears the failures of a resumed run",
        kind=_number,
        metavar="SLOT",
        nargs="*",
    )
    replica_batches: tuple[int, ...] | None = knob(
        None,
        "failures",
        "number of sequences for each remaining replica (default: in proportion to its tp)",
        kind=_number,
        metavar="N",
        nargs="+",
    )
    even: bool = knob(False, "failures", "give all replicas that lost a device the lowest degree among them", kind=bool)
    min_tp: int = knob(1, "failures", "drop a replica that can only continue at a lower tp than this", metavar="N")
    core_tp: int | None = knob(
        None,
        "failures",
        "tp at which master weights are stored (default: the one that sends the fewest bytes)",
        metavar="N",
    )

    def __post_init__(self) -> None:
        as_tuple(self, "failed_devices", "replica_batches")
        check_knobs(self)
        for name in ("failed_devices", "replica_batches"):  # a settings file may hold anything
            value = getattr(self, name) or ()
            if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in value):
                raise ValueError(f"`{name}` is {brief(value)}; it must be a list of whole numbers of at least 0.")

    @property
    def any(self) -> bool:
        """Whether replicas may differ."""
        return bool(self.failed_devices or self.replica_batches)

    def check_healthy(self) -> None:
        """Checks that a run without failed devices sets no options that only apply with failed devices.

        Raises:
            ValueError: if it does; the message names the flags.
        """
        others = {"even": self.even, "min_tp": self.min_tp != 1, "core_tp": self.core_tp is not None}
        flags = ", ".join(f"--{name.replace('_', '-')}" for name, asked in others.items() if asked)
        if flags:
            raise ValueError(f"{flags}: this applies only to a run with failed devices. Add --failed-devices.")

    def plan(self, *, dp: int, gtp: int, tp: int, batch: int, microbatches: int) -> FaultPlan:
        """Returns the plan for the remaining devices.

        Raises:
            ValueError: for the same reasons as `plan_faults`.
        """
        from ...nonuniform import plan_faults

        try:
            return plan_faults(
                dp=dp,
                gtp=gtp,
                tp=tp,
                failed=self.failed_devices,
                batch=batch,
                microbatches=microbatches,
                batches=self.replica_batches,
                even=self.even,
                min_tp=self.min_tp,
                core_tp=self.core_tp,
            )
        except ValueError as error:
            text = str(error)
            for theirs, ours in _ARGUMENTS.items():
                text = text.replace(f"`{theirs}`", f"`{ours}`")
            raise ValueError(text) from error
