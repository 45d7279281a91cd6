"""Records what a process does in the record of its run, and adds up the seconds of each activity."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, NoReturn, Self

from ...checkpoint import Checkpoints
from ._directory import RunDirectory
from ._events import EventLog
from ._json_socket import Message
from ._peers import Peers
from ._watch import Activity, Watch

# The activities that are recorded as events. A step is not, because `log.jsonl` records it.
_EVENTS = ("initialize", "restore", "compile", "evaluate", "save", "snapshot")


class Recorder(Watch):
    """A watch that records what it is told, and passes it on to another watch.

    Args:
        watch: the watch over this process.

    Attributes:
        events: the record of the run. Nothing is written until it is set, once the directory of the run is known.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch, self.events = watch, EventLog(None)
        self._activity: Activity = "start"
        self._step, self._since = 0, time.monotonic()
        self._seconds: dict[str, float] = {}
        self._ended = False

    @property
    def seconds(self) -> dict[str, float]:
        """The total time of each activity until now, in seconds."""
        running = self._seconds.get(self._activity, 0.0) + time.monotonic() - self._since
        return {name: round(s, 3) for name, s in {**self._seconds, self._activity: running}.items()}

    def __enter__(self) -> Self:
        self._watch.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._watch.__exit__(kind, *rest)

    def doing(self, activity: Activity, step: int = 0) -> None:
        """Records the activity that has ended, and passes the call on."""
        now = time.monotonic()
        before, ended, took_s = self._activity, self._step, now - self._since
        self._seconds[before] = self._seconds.get(before, 0.0) + took_s
        self._activity, self._step, self._since = activity, step, now
        if before in _EVENTS:
            self.write(before, step=ended, took_s=round(took_s, 3))
        self._watch.doing(activity, step)

    def write(self, event: str, text: str = "", **values: Any) -> None:
        """Adds an event, with the total seconds of each activity until now."""
        self.events.write(event, text, **values, seconds=self.seconds)

    def end(self, status: int | str, reason: str = "") -> None:
        """Records the end of this attempt. Further calls do nothing.

        Ignores errors of writing: what ended the attempt, such as a full disk or a lost lock, may also keep the record
        from being written.
        """
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(OSError):
            self.write("end", status=status, step=self._step, **({"reason": reason} if reason else {}))

    def give_up(self, error: Exception, reason: str) -> NoReturn:
        """Records the reason, and passes the call on."""
        self.end("failed", reason)
        self._watch.give_up(error, reason)

    def attend(self, peers: Peers, directory: RunDirectory) -> None:
        """Passes the call on."""
        self._watch.attend(peers, directory)

    def heard(self, process: int, message: Message | None) -> None:
        """Passes the call on."""
        self._watch.heard(process, message)

    def leave(self, reason: str, code: int) -> None:
        """Records the reason, and passes the call on."""
        self.end(code, reason)
        self._watch.leave(reason, code)

    def timed(self, what: str, seconds: float) -> None:
        """Passes the call on."""
        self._watch.timed(what, seconds)

    def source(self, checkpoints: Checkpoints, state_like: Any) -> Checkpoints:
        """Passes the call on."""
        return self._watch.source(checkpoints, state_like)

    def stepped(self, step: int, state: Any, save: Callable[[Checkpoints], bool]) -> None:
        """Passes the call on."""
        self._watch.stepped(step, state, save)
