"""Decides how long a process may be silent, or busy with one activity, before it counts as hung."""

from __future__ import annotations

import dataclasses

from ..trainer import Activity

# The interval between heartbeats, which a separate thread sends.
BEAT_S = 0.5

# Before the first step, JAX may hold the GIL for a long time.
_SILENT_AT_FIRST_S = 60.0
_SILENT_S = 8.0

# Before its first heartbeat, a process imports. It may take 15 minutes until another process has finished importing,
# then ten times as long as that process took.
STARTING_S = 900.0
_STARTING_LEAST_S = 180.0
# How long imports take on an idle host.
_START_S = 10.0

# Applies until an activity of the same kind has ended: compilation, restoring and other work that happens once.
_BUSY_AT_FIRST_S = 900.0
_BUSY_S = 30.0
_TIMES_THE_LONGEST = 10.0


def slowness(imported_s: float) -> float:
    """Returns the factor by which to extend time limits on a host where imports took `imported_s`; at least 1."""
    return max(1.0, imported_s / _START_S)


@dataclasses.dataclass
class Patience:
    """Learns how long to wait from activities that took long and ended well.

    An overloaded host is recognized at the start: where imports are slow, everything is slow.
    """

    _longest_gap_s: float = 0.0
    _longest_start_s: float = 0.0

    def started(self, seconds: float) -> None:
        """Learns from the seconds between the start of a process and its first heartbeat."""
        self._longest_start_s = max(self._longest_start_s, seconds)

    def beat(self, gap_s: float) -> None:
        """Learns from the seconds between two heartbeats that a process has sent."""
        self._longest_gap_s = max(self._longest_gap_s, gap_s)

    def silence_s(self, activity: Activity | None, *, stepped: bool) -> float:
        """Returns how long a process may be silent, in seconds.

        Args:
            activity: what the process is doing; `None` before its first heartbeat.
            stepped: whether the fleet has completed a step.
        """
        if activity is None:
            others_s = self._longest_start_s
            return max(_STARTING_LEAST_S, _TIMES_THE_LONGEST * others_s) if others_s else STARTING_S
        usual_s = _SILENT_S if stepped else _SILENT_AT_FIRST_S
        return max(usual_s * slowness(self._longest_start_s), 4 * self._longest_gap_s)

    def busy_s(self, longest_s: float | None) -> float:
        """Returns how long a process may be busy with one activity, in seconds.

        Args:
            longest_s: the duration of this process's longest completed activity of the same kind, in seconds; `None` if
                none has completed.
        """
        usual_s = _BUSY_AT_FIRST_S if longest_s is None else _BUSY_S
        return max(usual_s * slowness(self._longest_start_s), _TIMES_THE_LONGEST * (longest_s or 0.0))
