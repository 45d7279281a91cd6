"""How long a process has been in its phase, and its peers silent, without the time in which it was itself suspended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from ._watch import Activity

TICK_S = 1.0

# Seconds of a phase. The first step and all evaluations compile, and text and checkpoints may come from slow disks.
LIMITS_S: Mapping[Activity, float] = {
    "start": 180.0,  # and the time in which all processes must have come
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

# A warm step may take this many times the longest before it, and this long in any case.
_TIMES_THE_LONGEST = 10.0
_WARM_STEP_S = 120.0

# Before the first step has ended, imports and JAX may hold Python's lock for long.
SILENT_AT_FIRST_S = 60.0
SILENT_S = 20.0

# A tick that comes later than this was not delayed by load: the process, or the machine, was suspended.
_SUSPENDED_S = 4.0


class PhaseClock:
    """The clock of one process. To be ticked every `TICK_S` seconds; not for several threads at once.

    Args:
        now: the monotonic clock.
        limits_s: seconds of each phase.
        silent_s: seconds without a word after which a peer counts as gone, once a step has ended.
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
        """Notes what the process does from now on. A step that follows another one directly ends that one."""
        now = self._now()
        if self.activity == activity == "step" and step > self.step:
            if self._first_step_over:
                self._longest_step_s = max(now - self._began, self._longest_step_s or 0.0)
            self._first_step_over = True
        elif activity == "compile":
            self._first_step_over = False
        self.activity, self.step, self._began = activity, step, now

    def tick(self) -> float:
        """Returns the seconds for which the process was suspended since the last tick, and forgives them."""
        now = self._now()
        late = now - self._ticked - TICK_S
        self._ticked = now
        if late < _SUSPENDED_S:
            return 0.0
        self._began = min(now, self._began + late)
        self._heard = {process: min(now, heard + late) for process, heard in self._heard.items()}
        return late

    def expect(self, processes: Iterable[int]) -> None:
        """Expects signs of life of these peers, from now on."""
        self._heard = dict.fromkeys(processes, self._now())

    def heard(self, process: int) -> None:
        """Notes a sign of life."""
        if process in self._heard:
            self._heard[process] = self._now()

    def forget(self, process: int) -> None:
        """Expects nothing of a peer any more."""
        self._heard.pop(process, None)

    @property
    def silence_s(self) -> float:
        """Seconds for which a peer may be silent."""
        return self._silent_s if self._first_step_over else max(self._silent_s, SILENT_AT_FIRST_S)

    def silent(self) -> list[int]:
        """Returns the peers that have been silent for too long."""
        now = self._now()
        return [process for process, heard in sorted(self._heard.items()) if now - heard > self.silence_s]

    @property
    def elapsed_s(self) -> float:
        """Seconds of this phase."""
        return self._now() - self._began

    @property
    def limit_s(self) -> float:
        """Seconds that this phase may take; of a step, learned from those that compiled nothing."""
        if self.activity == "step" and self._longest_step_s is not None:
            return max(min(_WARM_STEP_S, self._limits_s["step"]), _TIMES_THE_LONGEST * self._longest_step_s)
        return self._limits_s[self.activity]
