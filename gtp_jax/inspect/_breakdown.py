"""Breaks down the time of a step: every moment belongs to one kind of work, to exposed communication, or to idling."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ._trace import KINDS, Op

EXPOSED, IDLE = "exposed communication", "idle"


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """Sums over a trace, in microseconds.

    Attributes:
        total_us: from the first kernel's start to the last one's end.
        by_kind: how long each kind of compute ran, `EXPOSED` communication, and `IDLE`; adds up to the total.
        communication_us: how long something was communicated, under compute or not.
        exposed: the stretches of exposed communication, (start, end).
    """

    total_us: float
    by_kind: dict[str, float]
    communication_us: float
    exposed: tuple[tuple[float, float], ...]

    @property
    def exposed_us(self) -> float:
        """Communication with no compute beside it."""
        return self.by_kind.get(EXPOSED, 0.0)

    def share(self, kind: str) -> float:
        """Returns its share of the total."""
        return self.by_kind.get(kind, 0.0) / self.total_us if self.total_us else 0.0


def breakdown(ops: Sequence[Op]) -> Breakdown:
    """Adds up kernels; where several compute at once, the time is that of the one that began first."""
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
