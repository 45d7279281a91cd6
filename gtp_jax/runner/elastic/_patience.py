"""How long a process may be silent, or busy with one thing, before it counts as hung."""

from __future__ import annotations

import dataclasses

from ..trainer import Activity

# A beat in this time, from a thread of its own.
BEAT_S = 0.5

# What JAX does before the first step may hold Python's lock for long.
_SILENT_AT_FIRST_S = 60.0
_SILENT_S = 8.0

# Before the first beat a process imports. It has 15 minutes until another one has done so, then ten times as long as
# that one.
STARTING_S = 900.0
_STARTING_LEAST_S = 180.0
# What imports take on a host with time to spare.
_START_S = 10.0

# Before any has ended, for compilation, restoring and whatever else comes once.
_BUSY_AT_FIRST_S = 900.0
_BUSY_S = 30.0
_TIMES_THE_LONGEST = 10.0


def slowness(imported_s: float) -> float:
    """Returns how many times longer than usual to wait on a host where imports took so long; at least 1."""
    return max(1.0, imported_s / _START_S)


@dataclasses.dataclass
class Patience:
    """Learns, from what took long and ended well, how long to wait.

    A host with more to do than time for it shows at the start: processes that take long to import take long for all.
    """

    _longest_gap_s: float = 0.0
    _longest_start_s: float = 0.0

    def started(self, seconds: float) -> None:
        """Learns from the seconds between the start of a process and its first beat."""
        self._longest_start_s = max(self._longest_start_s, seconds)

    def beat(self, gap_s: float) -> None:
        """Learns from the seconds between two beats of a process, the second of which has come."""
        self._longest_gap_s = max(self._longest_gap_s, gap_s)

    def silence_s(self, activity: Activity | None, *, stepped: bool) -> float:
        """Returns how long a process may send nothing.

        Args:
            activity: what it does; `None` before its first beat.
            stepped: whether the fleet has made a step.
        """
        if activity is None:
            others_s = self._longest_start_s
            return max(_STARTING_LEAST_S, _TIMES_THE_LONGEST * others_s) if others_s else STARTING_S
        usual_s = _SILENT_S if stepped else _SILENT_AT_FIRST_S
        return max(usual_s * slowness(self._longest_start_s), 4 * self._longest_gap_s)

    def busy_s(self, longest_s: float | None) -> float:
        """Returns how long a process may be busy with one activity.

        Args:
            longest_s: seconds of the longest such activity of this process that has ended; `None` if none has.
        """
        usual_s = _BUSY_AT_FIRST_S if longest_s is None else _BUSY_S
        return max(usual_s * slowness(self._longest_start_s), _TIMES_THE_LONGEST * (longest_s or 0.0))
