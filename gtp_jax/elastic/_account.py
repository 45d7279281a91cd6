"""What failures cost: steps, and seconds in parts."""

from __future__ import annotations

import dataclasses
import time

from ._events import PARTS, EventLog
from ._failure import Failure
from ._fleet import Fleet
from ._goodput import Goodput


@dataclasses.dataclass(frozen=True)
class _Lost:
    """A failure from which the run has not recovered yet.

    Attributes:
        failure: the first of those since the last step.
        verdict: when it was known with which devices to go on, on the monotonic clock.
        count: how many failures there have been since.
    """

    failure: Failure
    verdict: float
    count: int


class Account:
    """Follows fleets and writes what each recovery took.

    Args:
        events: where it is written.
    """

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._goodput = Goodput()
        self._lost: _Lost | None = None
        self._failures = self._steps_lost = 0
        self._committed = False
        self._followed: Fleet | None = None

    def follow(self, fleet: Fleet) -> None:
        """Writes when the fleet has made its first step, and what it took if there was a failure before."""
        if fleet is self._followed or fleet.first_step_at is None or fleet.begin_step is None:
            return
        self._followed = fleet
        self._events.write("training", step=fleet.step)
        if self._lost is None:
            return
        lost, self._lost = self._lost, None
        marks = fleet.marks
        # a fleet that was started before the verdict has waited for it
        checked = max(lost.verdict, marks["restore"])
        compiling = max(checked, marks["first compile"])
        ready = max(compiling, min(marks[f"first {name}"] for name in ("step", "evaluate") if f"first {name}" in marks))
        ends = (lost.verdict, checked, compiling, ready, fleet.first_step_at)
        begins = (lost.failure.last_sign, *ends[:-1])
        seconds = dict(zip(PARTS, (e - b for b, e in zip(begins, ends, strict=True)), strict=True))
        total = ends[-1] - begins[0]
        steps_lost = max(0, lost.failure.step - fleet.begin_step)
        self._steps_lost += steps_lost
        parts = ", ".join(f"{name.removesuffix('_s')} {value:.1f}" for name, value in seconds.items())
        self._events.write(
            "recovered",
            f"the run goes on from step {fleet.begin_step}: {steps_lost} steps and {total:.1f} s lost ({parts})",
            step=fleet.begin_step,
            steps_lost=steps_lost,
            failures=lost.count,
            total_s=total,
            **seconds,
        )

    def commit(self, fleet: Fleet, step: int) -> None:
        """Notes that a snapshot counts from now on."""
        self._committed = True
        stepping_s = max((member.stepping_s for member in fleet.members), default=0.0)
        self._goodput.commit(step, stepping_s)
        self._events.write("snapshot", step=step, fleet_step=fleet.step)

    def end_fleet(self, fleet: Fleet, kept_step: int) -> bool:
        """Closes a fleet's account and returns whether it has made progress that is kept.

        Args:
            fleet: that ends now.
            kept_step: from which the next one goes on.
        """
        self._goodput.restart(kept_step)
        self._events.write("fleet ended", step=fleet.step, kept_step=kept_step)
        progressed, self._committed = self._committed or kept_step > (fleet.begin_step or 0), False
        return progressed

    def failed(self, failure: Failure, *, reaped: float) -> None:
        """Notes a failure whose verdict is known now."""
        self._failures += 1
        first = self._lost.failure if self._lost is not None else failure
        count = self._lost.count + 1 if self._lost is not None else 1
        self._lost = _Lost(first, time.monotonic(), count)
        self._events.write(
            "verdict",
            noticed_s=failure.noticed - failure.last_sign,
            reaped_s=reaped - failure.noticed,
            probed_s=time.monotonic() - reaped,
        )

    def finish(self, status: int, stepping_s: float, step: int) -> None:
        """Writes the end, with the goodput.

        Args:
            status: of the run.
            stepping_s: seconds of the last fleet's steps.
            step: updates made in all.
        """
        share = self._goodput.share(stepping_s)
        self._events.write(
            "end",
            f"goodput {share:.1%}: the share of the time in which steps were made that count; "
            f"failures: {self._failures}, steps lost: {self._steps_lost}",
            status=status,
            step=step,
            goodput=share,
            failures=self._failures,
            steps_lost=self._steps_lost,
        )
