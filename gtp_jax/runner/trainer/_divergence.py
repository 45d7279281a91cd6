"""How a run handles steps that are not finite, and loss spikes."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any, Literal, Self, get_args

from .._exit_codes import DIVERGED
from ..flags import check_knobs, knob

Policy = Literal["raise", "skip", "rollback"]
POLICIES: tuple[Policy, ...] = get_args(Policy)

# The number of previous losses that spikes are compared with, and the minimum number for a comparison.
_WINDOW, _FEWEST = 64, 16
# The standard deviation of normally distributed numbers is 1.4826 times their median absolute deviation.
_SIGMAS_PER_DEVIATION = 1.4826


class Diverged(Exception):
    """Raised when the loss or a gradient is no longer finite."""

    exit_code = DIVERGED


@dataclasses.dataclass(frozen=True, kw_only=True)
class Divergence:
    """How a run handles a step that is not finite, or whose loss is a spike.

    Raises:
        ValueError: if a value is out of range, or values do not fit together.
    """

    nonfinite: Policy = knob(
        "raise",
        "divergence",
        "what to do after a step whose loss or gradients are not finite: end the run, skip the batch, or go back to "
        "the last checkpoint and skip all batches since then; such a step never changes the state",
        kind=str,
        choices=POLICIES,
    )
    nonfinite_in_a_row: int = knob(
        3,
        "divergence",
        "number of such steps in a row after which `skip` ends the run and `rollback` goes back; fewer are skipped",
        metavar="N",
    )
    max_rollbacks: int = knob(2, "divergence", "number of times that a run may go back before it ends", metavar="N")
    spike: float | None = knob(
        None,
        "divergence",
        f"end the run, or go back, at a loss this many robust standard deviations above the median of the last "
        f"{_WINDOW} (default: never)",
        kind=float,
        above=0,
        metavar="SIGMAS",
    )

    def __post_init__(self) -> None:
        check_knobs(self)
        if self.spike is not None and self.nonfinite == "skip":
            raise ValueError(
                "`spike` is set and `nonfinite` is 'skip', but a spike is detected only after its update, when the "
                "batch can no longer be skipped. Use `nonfinite` 'rollback' or 'raise', or remove `spike`."
            )


@dataclasses.dataclass(frozen=True)
class Place:
    """The progress of a run. Saved with every checkpoint, so that a stopped run continues as if never stopped.

    Attributes:
        step: the number of updates made.
        position: the number of the next batch: the number of updates plus that of skipped batches.
        in_a_row: the number of steps since the last update that were not finite.
        rollbacks: the number of times that the run went back.
        losses: the losses of the latest updates, to detect spikes; empty if spikes are not detected.
    """

    step: int
    position: int
    in_a_row: int = 0
    rollbacks: int = 0
    losses: tuple[float, ...] = ()

    @classmethod
    def of_extra(cls, step: int, extra: Mapping[str, Any]) -> Self:
        """Returns the place at which a checkpoint was saved."""
        saved = extra["place"]
        return cls(step, **{**saved, "losses": tuple(saved["losses"])})

    @classmethod
    def to_continue(cls, step: int, extra: Mapping[str, Any], steps: int, out: str) -> Self:
        """Returns the place at which a run continues from a checkpoint.

        Raises:
            ValueError: if the run in `out` has already made more than `steps` updates.
        """
        if step > steps:
            raise ValueError(
                f"`steps` is {steps}, but the run in {out} has already made {step}. Increase --steps, or start another "
                "run with another --out."
            )
        return cls.of_extra(step, extra)

    def extra(self) -> dict[str, Any]:
        """Returns the JSON values that a checkpoint stores."""
        place = dataclasses.asdict(self)
        del place["step"]
        return {"place": {**place, "losses": list(self.losses)}}

    def updated(self, loss: float, *, keep_loss: bool) -> Self:
        """Returns the place after an update."""
        losses = (*self.losses, loss)[-_WINDOW:] if keep_loss else ()
        return dataclasses.replace(self, step=self.step + 1, position=self.position + 1, in_a_row=0, losses=losses)

    def skipped(self) -> Self:
        """Returns the place after a step that was not finite."""
        return dataclasses.replace(self, position=self.position + 1, in_a_row=self.in_a_row + 1)

    def rolled_back(self, saved: Self) -> Self:
        """Returns the place after going back to a checkpoint: the step of the checkpoint, but the current position."""
        return dataclasses.replace(saved, position=self.position, in_a_row=0, rollbacks=self.rollbacks + 1)


def is_spike(loss: float, before: tuple[float, ...], sigmas: float) -> bool:
    """Returns whether a loss is more than `sigmas` robust standard deviations above the median of previous losses.

    The deviation is 1.4826 times the median absolute deviation from the median, which is insensitive to a few outliers.
    It is at least a thousandth of the median, because otherwise any change after constant losses would be a spike.
    With fewer than 16 previous losses, nothing is a spike.
    """
    if len(before) < _FEWEST or not math.isfinite(loss):
        return False
    median = statistics.median(before)
    deviation = _SIGMAS_PER_DEVIATION * statistics.median(abs(x - median) for x in before)
    return loss > median + sigmas * max(deviation, 1e-3 * abs(median))
