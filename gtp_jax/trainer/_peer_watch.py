"""Ends a process whose peers are gone or stuck: a collective would wait for them forever.

A thread of each process rewrites its file every second and checks that the others' files change. No collective
and no clock is shared, so it works while the devices hang.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, Self

from ..checkpoint import Checkpoints
from ._directory import RunDirectory
from ._distributed import Launch
from ._guard import Guard, last_words
from ._watch import Activity, Watch

BEAT_S = 1.0
SILENT_S = 20.0
STALLED_S = 900.0

_RUNNING, _FAILED, _DONE = "running", "failed", "done"


class PeerWatch(Watch):
    """The watch of one process over the others. A context manager; does nothing for a single process.

    Args:
        directory: of the run, shared by the processes, its `alive` directory empty.
        launch: the processes.
        silent_s: seconds without a sign of life after which a process counts as dead.
        stalled_s: seconds without progress after which this process gives up.
    """

    def __init__(
        self,
        directory: RunDirectory,
        launch: Launch,
        *,
        silent_s: float = SILENT_S,
        stalled_s: float = STALLED_S,
    ) -> None:
        self._directory = directory
        self._process = launch.process
        self._silent_s, self._stalled_s = silent_s, stalled_s
        self._started = time.monotonic()
        self._seen = {p: ("", self._started) for p in range(launch.processes) if p != launch.process}
        self._progressed: float | None = None
        self._state = _RUNNING
        self._beats = 0
        self._stop = threading.Event()
        self._last_words = threading.Lock()
        self._guard: Guard | None = None
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Self:
        if self._seen:
            self._guard = Guard(self._directory, self._process)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._seen:
            return
        self._state = _DONE if kind is None else _FAILED
        self._stop.set()
        self._thread.join()
        self._beat()
        assert self._guard is not None
        self._guard.dismiss()

    def doing(self, activity: Activity, step: int = 0) -> None:
        """Notes that the run gets on, from the end of the first step or evaluation on."""
        del step
        if activity == "step":
            self._progressed = time.monotonic()

    def source(self, checkpoints: Checkpoints, state_like: Any) -> Checkpoints:
        """Returns the checkpoints of the run."""
        del state_like
        return checkpoints

    def stepped(self, step: int, state: Any, save: Callable[[Checkpoints], None]) -> None:
        """Does nothing: without a supervisor there are no snapshots."""

    def give_up(self, error: Exception, reason: str) -> NoReturn:
        """Says why, and how to resume, and ends the process at once."""
        del error
        self._end(reason)

    def _end(self, reason: str) -> NoReturn:
        if not self._last_words.acquire(blocking=False):
            time.sleep(60)  # another thread is saying it
        self._state = _FAILED
        self._beat()
        print(last_words(self._directory, self._process, reason), file=sys.stderr, flush=True)
        if self._guard is not None:
            self._guard.dismiss()
        os._exit(1)

    def _run(self) -> None:
        while not self._stop.wait(BEAT_S):
            self._beat()
            reason = self._trouble()
            if reason:
                self._end(reason)

    def _beat(self) -> None:
        self._beats += 1
        (self._directory.alive / str(self._process)).write_text(f"{self._beats} {self._state}")

    def _trouble(self) -> str:
        now = time.monotonic()
        for process, (before, since) in self._seen.items():
            try:
                beat = (self._directory.alive / str(process)).read_text()
            except OSError:
                beat = ""
            if beat.endswith(_FAILED):
                return f"process {process} ended with an error, which its own output shows"
            if beat.endswith(_DONE) or (beat and beat != before):
                self._seen[process] = (beat, now)
            elif now - since > self._silent_s:
                where = self._directory.alive
                hint = "" if before else f" (in {where}, which must be on a file system that all processes share)"
                return f"process {process} has given no sign of life for {self._silent_s:.0f} s{hint}"
        if self._progressed is not None and now - self._progressed > self._stalled_s:
            return f"no step has ended for {self._stalled_s:.0f} s, though all processes are alive"
        return ""
