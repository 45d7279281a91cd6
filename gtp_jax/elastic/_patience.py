"""How long a process may be silent, or busy with one thing, before it counts as hung."""

from __future__ import annotations

import dataclasses

from ..trainer import Activity

# A beat in this time, from a thread of its own.
BEAT_S = 0.5

# What JAX does before the first step may hold Python's lock for long, and so do imports before the first beat.
_SILENT_AT_FIRST_S = 60.0
_SILENT_S = 8.0
_STARTING_S = 180.0

# Before any has ended, for compilation, restoring and whatever else comes once.
_BUSY_AT_FIRST_S = 900.0
_BUSY_S = 30.0
_TIMES_THE_LONGEST = 10.0


@dataclasses.dataclass
class Patience:
    """Learns, from what took long and ended well, how long to wait."""

    _longest_gap_s: float = 0.0

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
            return _STARTING_S
        return max(_SILENT_S if stepped else _SILENT_AT_FIRST_S, 4 * self._longest_gap_s)

    def busy_s(self, longest_s: float | None) -> float:
        """Returns how long a process may be busy with one activity.

        Args:
            longest_s: seconds of the longest such activity of this process that has ended; `None` if none has.
        """
        return _BUSY_AT_FIRST_S if longest_s is None else max(_BUSY_S, _TIMES_THE_LONGEST * longest_s)
