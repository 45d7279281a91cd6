"""Measures how long a process has been in its phase and its peers have been silent, without time spent suspended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from ._watch import Activity

TICK_S = 1.0

# The limit of each phase, in seconds. The first step and evaluations include compilation, and text and checkpoints may
# come from slow disks.
LIMITS_S: Mapping[Activity, float] = {
    "start": 180.0,  # plus --join-timeout, which `PeerWatch` adds
    "join": 300.0,
    "check": 3600.0,
    "compile": 3600.0,
    "initialize": 3600.0,
    "restore": 3600.0,
    "step": 3600.0,
    "evaluate": 3600.0,
    "save": 3600.0,
    "snapshot": 3600.0,
    "diagnose": 3600.0,
}

# The limit of a warm step is this multiple of the longest one so far, and at least this many seconds.
_TIMES_THE_LONGEST = 10.0
_WARM_STEP_S = 120.0

# How long a peer may be silent, in seconds: longer before the first step has ended, because imports and JAX may hold
# Python's global lock for long.
SILENT_AT_FIRST_S = 60.0
SILENT_S = 20.0

# If a tick is late by at least this many seconds, the process or the machine was suspended: load alone delays it less.
_SUSPENDED_S = 4.0


class PhaseClock:
    """The clock of one process. The caller ticks it every `TICK_S` seconds. Not thread-safe.

    Args:
        now: returns the time of a monotonic clock, in seconds.
        limits_s: the limit of each phase, in seconds.
        silent_s: the seconds of silence after which a peer counts as gone, once the first step has ended.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        *,
        limits_s: Mapping[Activity, float] = LIMITS_S,
        silent_s: float = SILENT_S,
    ) -> None:
        self._now, self._limits_s, self._silent_s = now, limits_s, silent_s
        self.activity: Activity = "start"
        self.step = 0
        self._began = self._ticked = now()
        self._heard: dict[int, float] = {}
        self._first_step_over = False
        self._longest_step_s: float | None = None

    def begin(self, activity: Activity, step: int = 0) -> None:
        """Records the phase that begins now. If it is a step directly after another step, that one has ended."""
        now = self._now()
        if self.activity == activity == "step" and step > self.step:
            if self._first_step_over:
                self._longest_step_s = max(now - self._began, self._longest_step_s or 0.0)
            self._first_step_over = True
        elif activity == "compile":
            self._first_step_over = False
        self.activity, self.step, self._began = activity, step, now

    def tick(self) -> float:
        """Returns the seconds for which the process was suspended since the last tick, and excludes them from its phase
        and from the silence of its peers."""
        now = self._now()
        late = now - self._ticked - TICK_S
        self._ticked = now
        if late < _SUSPENDED_S:
            return 0.0
        self._began = min(now, self._began + late)
        self._heard = {process: min(now, heard + late) for process, heard in self._heard.items()}
        return late

    def expect(self, processes: Iterable[int]) -> None:
        """Expects signs of life from these peers from now on."""
        self._heard = dict.fromkeys(processes, self._now())

    def heard(self, process: int) -> None:
        """Records a sign of life from a peer."""
        if process in self._heard:
            self._heard[process] = self._now()

    def forget(self, process: int) -> None:
        """Stops expecting signs of life from a peer."""
        self._heard.pop(process, None)

    @property
    def silence_s(self) -> float:
        """How long a peer may be silent, in seconds."""
        return self._silent_s if self._first_step_over else max(self._silent_s, SILENT_AT_FIRST_S)

    def silent(self, share: float = 1.0) -> list[int]:
        """Returns the peers that have been silent for too long, or for a share of that."""
        now, least_s = self._now(), share * self.silence_s
        return [process for process, heard in sorted(self._heard.items()) if now - heard > least_s]

    @property
    def elapsed_s(self) -> float:
        """The time since this phase began, in seconds."""
        return self._now() - self._began

    @property
    def limit_s(self) -> float:
        """How long this phase may take, in seconds. A step's limit is learned from earlier warm steps."""
        if self.activity == "step" and self._longest_step_s is not None:
            return max(min(_WARM_STEP_S, self._limits_s["step"]), _TIMES_THE_LONGEST * self._longest_step_s)
        return self._limits_s[self.activity]
