"""Times the steps of a program from outside: from a call, or the end of the step before, to the end on the devices."""

from __future__ import annotations

import collections
import dataclasses
import statistics
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

_KEPT = 101  # durations of steps

# The folders of Python, its packages and this one, whose functions do not say what a program is doing.
_LIBRARIES = (*{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}, str(Path(__file__).parents[1]))


@dataclasses.dataclass
class _Flight:
    """A step that has not ended: a result, which is `None` while the program is being called; and its start."""

    result: Any
    since: float


class Steps:
    """The steps that a process has begun. `begin` and `launched` are called by the program, `look` by a watcher."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.begun, self._calls = 0, 0
        self._now, self._lock = now, threading.Lock()
        self._flights: collections.deque[_Flight] = collections.deque()
        self._thread = threading.main_thread().ident
        self._ended = now()
        self._seconds: collections.deque[float] = collections.deque(maxlen=_KEPT)

    def begin(self) -> None:
        """Records that a step is about to be called. Calls within a call are parts of the step."""
        self._calls += 1
        if self._calls > 1:
            return
        with self._lock:
            self.begun += 1
            self._thread = threading.get_ident()
            self._flights.append(_Flight(None, self._now()))

    def launched(self, result: Any) -> None:
        """Records the result of the call, a pytree of arrays; without any, the call has failed."""
        self._calls -= 1
        if self._calls:
            return
        leaves = [leaf for leaf in jax.tree.leaves(result) if isinstance(leaf, jax.Array)]
        with self._lock:
            if leaves:
                self._flights[-1].result = min(leaves, key=lambda leaf: leaf.size)
            else:
                self._flights.pop()

    def look(self, suspended_s: float = 0.0) -> float:
        """Looks which steps have ended, and returns how long the oldest of the others has taken, in seconds; 0 if there
        is none. Time in which the program is traced and compiled does not count.

        Args:
            suspended_s: the seconds for which this process has been suspended since the last look, which do not count.
        """
        with self._lock:
            now = self._now()
            while self._flights and _is_over(self._flights[0].result):
                self._seconds.append(now - max(self._flights.popleft().since, self._ended))
                self._ended = now
            if not self._flights:
                return 0.0
            oldest = self._flights[0]
            if self._compiles(oldest):
                oldest.since = now
            oldest.since = min(now, max(oldest.since, self._ended) + suspended_s)
            return now - oldest.since

    @property
    def compiles(self) -> bool:
        """Whether the program of the last step is traced or compiled."""
        with self._lock:
            return bool(self._flights) and self._compiles(self._flights[-1])

    def _compiles(self, flight: _Flight) -> bool:
        return flight.result is None and is_traced(self._thread)

    @property
    def in_flight(self) -> int:
        """The number of steps that have not ended."""
        return len(self._flights)

    @property
    def median_s(self) -> float | None:
        """The median duration of the last steps; `None` if none has ended."""
        return statistics.median(self._seconds) if self._seconds else None

    def python(self) -> str:
        """Returns what the thread that calls steps is doing in Python."""
        frames = _frames(self._thread)
        own = next((f for f in frames if not f.f_code.co_filename.startswith(_LIBRARIES)), next(iter(frames), None))
        if own is None:
            return "no thread"
        return f"{own.f_code.co_name} ({Path(own.f_code.co_filename).name}:{own.f_lineno})"


def _is_over(result: Any) -> bool:
    try:
        return result is not None and result.is_ready()
    except RuntimeError:  # deleted, or the program has failed
        return True


def is_traced(thread: int | None) -> bool:
    """Returns whether a thread is tracing or compiling a program. JAX calls a compiled one without Python frames of its
    own, except the first time."""
    files = [frame.f_code.co_filename for frame in _frames(thread)]
    return any(file.endswith("_src/pjit.py") for file in files) and not files[0].endswith("interpreters/pxla.py")


def _frames(thread: int | None) -> list[Any]:
    """Returns the frames of a thread, the innermost first."""
    found, frame = [], sys._current_frames().get(thread) if thread is not None else None
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found
