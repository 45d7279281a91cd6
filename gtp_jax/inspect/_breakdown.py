"""Breaks down the time of a step: each moment is one kind of work, exposed communication, or idle."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ._trace import KINDS, Op

EXPOSED, IDLE = "exposed communication", "idle"


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """Sums over a trace, in microseconds.

    Attributes:
        total_us: the time from the start of the first kernel to the end of the last one.
        by_kind: the time of each kind of compute, of `EXPOSED` communication and of `IDLE`, which add up to the total.
            Those without time are left out.
        communication_us: the time during which any communication ran, hidden under compute or not.
        exposed: the intervals of exposed communication, as (start, end), on the time axis of the kernels.
    """

    total_us: float
    by_kind: dict[str, float]
    communication_us: float
    exposed: tuple[tuple[float, float], ...]

    @property
    def exposed_us(self) -> float:
        """The time of communication during which no compute ran."""
        return self.by_kind.get(EXPOSED, 0.0)

    def share(self, kind: str) -> float:
        """Returns the share that an entry of `by_kind` has in the total time; 0 if there is no such entry."""
        return self.by_kind.get(kind, 0.0) / self.total_us if self.total_us else 0.0


def breakdown(ops: Sequence[Op]) -> Breakdown:
    """Adds up the times of kernels. Time in which several compute kernels run counts for the one that started first."""
    points = sorted({t for op in ops for t in (op.start_us, op.end_us)})
    starts = sorted(ops, key=lambda op: op.start_us)
    by_kind = dict.fromkeys((*KINDS, EXPOSED, IDLE), 0.0)
    communication, exposed, running, following = 0.0, [], [], 0
    for begin, end in zip(points, points[1:], strict=False):
        while following < len(starts) and starts[following].start_us <= begin:
            running.append(starts[following])
            following += 1
        running = [op for op in running if op.end_us > begin]
        computing = next((op for op in running if not op.is_collective), None)
        communicating = any(op.is_collective for op in running)
        communication += (end - begin) * communicating
        by_kind[computing.kind if computing else EXPOSED if communicating else IDLE] += end - begin
        if communicating and computing is None:
            if exposed and exposed[-1][1] == begin:
                begin = exposed.pop()[0]
            exposed.append((begin, end))
    total = points[-1] - points[0] if points else 0.0
    return Breakdown(total, {kind: us for kind, us in by_kind.items() if us}, communication, tuple(exposed))
