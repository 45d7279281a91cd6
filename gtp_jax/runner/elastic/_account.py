"""Accounts for what failures cost: steps, and seconds by part of the recovery."""

from __future__ import annotations

import dataclasses
import time

from ..trainer import EventLog
from ._events import PARTS
from ._failure import Failure
from ._fleet import Fleet
from ._goodput import Goodput


@dataclasses.dataclass(frozen=True)
class _Pause:
    """An interval without training that is still open.

    Attributes:
        cause: `failure` or `rejoin`.
        step: the number of updates made when training stopped.
        since: when training stopped: the last sign of life of the process that failed first.
        verdict: when it became known which devices to continue with.
        count: the number of failures in this interval.
    """

    cause: str
    step: int
    since: float
    verdict: float
    count: int


class Account:
    """Follows fleets and records how long each recovery took.

    Args:
        events: the log that it writes to.
    """

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._goodput = Goodput()
        self._pause: _Pause | None = None
        self._failures = self._steps_lost = 0
        self._committed = False
        self._followed: Fleet | None = None

    def follow(self, fleet: Fleet) -> None:
        """Records the fleet's first step and, if it ends a pause, how long the recovery took."""
        if fleet is self._followed or fleet.first_step_at is None or fleet.begin_step is None:
            return
        self._followed = fleet
        self._events.write("training", step=fleet.step)
        if self._pause is None:
            return
        pause, self._pause = self._pause, None
        marks, began = fleet.marks, fleet.state_began
        assert began is not None  # before its first step
        # a fleet that started before the verdict had to wait for it
        checked = max(pause.verdict, began)
        compiling = max(checked, marks["first compile"])
        ready = max(compiling, min(marks[f"first {name}"] for name in ("step", "evaluate") if f"first {name}" in marks))
        ends = (pause.verdict, checked, compiling, ready, fleet.first_step_at)
        begins = (pause.since, *ends[:-1])
        seconds = dict(zip(PARTS, (e - b for b, e in zip(begins, ends, strict=True)), strict=True))
        total = ends[-1] - begins[0]
        steps_lost = max(0, pause.step - fleet.begin_step)
        self._steps_lost += steps_lost
        parts = ", ".join(f"{name.removesuffix('_s')} {value:.1f}" for name, value in seconds.items())
        self._events.write(
            "recovered",
            f"the run continues from step {fleet.begin_step}: {steps_lost} steps and {total:.1f} s lost ({parts})",
            step=fleet.begin_step,
            steps_lost=steps_lost,
            cause=pause.cause,
            failures=pause.count,
            total_s=total,
            **seconds,
        )

    def commit(self, fleet: Fleet, step: int) -> None:
        """Records that a snapshot has been committed."""
        self._committed = True
        stepping_s = max((member.stepping_s for member in fleet.members), default=0.0)
        self._goodput.commit(step, stepping_s)
        self._events.write("snapshot", step=step, fleet_step=fleet.step)

    def end_fleet(self, fleet: Fleet, kept_step: int) -> bool:
        """Closes a fleet's account and returns whether the fleet made progress that is kept.

        Args:
            fleet: the fleet that is ending.
            kept_step: the step from which the next fleet continues.
        """
        self._goodput.restart(kept_step)
        self._events.write("fleet ended", step=fleet.step, kept_step=kept_step)
        progressed, self._committed = self._committed or kept_step > (fleet.begin_step or 0), False
        return progressed

    def failed(self, failure: Failure, *, reaped: float) -> None:
        """Records a failure; the time of the call is the time of its verdict."""
        self._failures += 1
        now = time.monotonic()
        if self._pause is None:
            self._pause = _Pause("failure", failure.step, failure.last_sign, now, 1)
        else:
            self._pause = dataclasses.replace(self._pause, verdict=now, count=self._pause.count + 1)
        self._events.write(
            "verdict",
            noticed_s=failure.noticed - failure.last_sign,
            reaped_s=reaped - failure.noticed,
            probed_s=now - reaped,
        )

    def rejoined(self, step: int) -> None:
        """Records that a fleet is ending because a device has come back."""
        now = time.monotonic()
        self._pause = self._pause or _Pause("rejoin", step, now, now, 0)

    def finish(self, status: int, stepping_s: float, step: int) -> None:
        """Records the end of the run, with the goodput.

        Args:
            status: the exit status of the run.
            stepping_s: the seconds that the last fleet spent in steps.
            step: the total number of updates made.
        """
        share = self._goodput.share(stepping_s)
        self._events.write(
            "end",
            f"goodput {share:.1%}: the share of time spent on steps that were kept; "
            f"failures: {self._failures}, steps lost: {self._steps_lost}",
            status=status,
            step=step,
            goodput=share,
            failures=self._failures,
            steps_lost=self._steps_lost,
        )
