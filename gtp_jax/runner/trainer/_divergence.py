"""What a run does about steps that are not finite, and about losses that jump."""

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

# Losses that the rule of spikes looks back at, and how many it needs.
_WINDOW, _FEWEST = 64, 16
# The median absolute deviation of normally distributed numbers is 1 / 1.4826 of their standard deviation.
_SIGMAS_PER_DEVIATION = 1.4826


class Diverged(Exception):
    """The loss, or a gradient, is no number any more."""

    exit_code = DIVERGED


@dataclasses.dataclass(frozen=True, kw_only=True)
class Divergence:
    """What a run does about a step that is not finite, or whose loss is a spike.

    Raises:
        ValueError: if a value is out of range, or values do not fit one another.
    """

    nonfinite: Policy = knob(
        "raise",
        "divergence",
        "a step whose loss or gradients are not finite changes nothing; then end the run, skip its batch, or go back "
        "to the last checkpoint and skip all batches since",
        kind=str,
        choices=POLICIES,
    )
    nonfinite_in_a_row: int = knob(
        3,
        "divergence",
        "such steps in a row at which `skip` ends the run and `rollback` goes back; those before are skipped",
        metavar="N",
    )
    max_rollbacks: int = knob(2, "divergence", "times a run goes back before it ends", metavar="N")
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
                "`spike` is set and `nonfinite` is 'skip': a spike is known after its update, which cannot be skipped "
                "any more. Take `nonfinite` 'rollback' or 'raise', or leave `spike` out."
            )


@dataclasses.dataclass(frozen=True)
class Place:
    """How far a run is. Saved with every checkpoint, so that a run that was stopped goes on as if it never was.

    Attributes:
        step: updates made.
        position: number of the next batch: the updates, and the batches that were skipped.
        in_a_row: steps that were not finite, since the last update.
        rollbacks: times the run went back.
        losses: of the latest updates, for the rule of spikes; empty without one.
    """

    step: int
    position: int
    in_a_row: int = 0
    rollbacks: int = 0
    losses: tuple[float, ...] = ()

    @classmethod
    def of_extra(cls, step: int, extra: Mapping[str, Any]) -> Self:
        """Returns the place that a checkpoint was saved at."""
        saved = extra["place"]
        return cls(step, **{**saved, "losses": tuple(saved["losses"])})

    def extra(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of it, JSON."""
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
        """Returns the place to go on from after going back to a checkpoint: its state, and the data from here on."""
        return dataclasses.replace(saved, position=self.position, in_a_row=0, rollbacks=self.rollbacks + 1)


def is_spike(loss: float, before: tuple[float, ...], sigmas: float) -> bool:
    """Says whether a loss lies so many robust standard deviations above the median of those before.

    The deviation is the median absolute deviation from the median, which a few outliers do not move, times 1.4826; at
    least a thousandth of the median, as losses that do not move at all would make everything a spike. Few losses make
    no rule: below 16 nothing is a spike.
    """
    if len(before) < _FEWEST or not math.isfinite(loss):
        return False
    median = statistics.median(before)
    deviation = _SIGMAS_PER_DEVIATION * statistics.median(abs(x - median) for x in before)
    return loss > median + sigmas * max(deviation, 1e-3 * abs(median))
