"""What failures cost: steps, and seconds in parts."""

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
    """A time without training that has not ended yet.

    Attributes:
        cause: `failure`, or `rejoin`.
        step: updates that had been made.
        since: when training stopped: the last sign of life of the process that failed first.
        verdict: when it was known with which devices to go on.
        count: how many failures there have been since.
    """

    cause: str
    step: int
    since: float
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
        self._pause: _Pause | None = None
        self._failures = self._steps_lost = 0
        self._committed = False
        self._followed: Fleet | None = None

    def follow(self, fleet: Fleet) -> None:
        """Writes when the fleet has made its first step, and what it took if there was a failure before."""
        if fleet is self._followed or fleet.first_step_at is None or fleet.begin_step is None:
            return
        self._followed = fleet
        self._events.write("training", step=fleet.step)
        if self._pause is None:
            return
        pause, self._pause = self._pause, None
        marks, began = fleet.marks, fleet.state_began
        assert began is not None  # before its first step
        # a fleet that was started before the verdict has waited for it
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
            f"the run goes on from step {fleet.begin_step}: {steps_lost} steps and {total:.1f} s lost ({parts})",
            step=fleet.begin_step,
            steps_lost=steps_lost,
            cause=pause.cause,
            failures=pause.count,
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
        """Notes that a fleet has been ended because a device has come back."""
        now = time.monotonic()
        self._pause = self._pause or _Pause("rejoin", step, now, now, 0)

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
