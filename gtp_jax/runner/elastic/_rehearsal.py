"""A rehearsal: processes that only compile, so that a smaller fleet finds its programs in the persistent cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from ..trainer import EventLog, Message
from ._devices import Device
from ._failure import Ended
from ._fleet import Fleet

_LIMIT_S = 900.0


class Rehearsal:
    """Compiles in the background, beside a fleet that trains on the same devices.

    Args:
        devices: of the smaller fleet.
        environment: of all processes.
        order: message of a process, by its number.
        events: told how it went.

    Attributes:
        size: number of devices.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        environment: Mapping[str, str],
        order: Callable[[int], Message],
        events: EventLog,
    ) -> None:
        # the fleet holds most of the memory, and the compiler needs little
        self._fleet: Fleet | None = Fleet(devices, {**environment, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
        self._fleet.order([device.number for device in devices], order)
        self._events, self.size, self._begin = events, len(devices), time.monotonic()

    def poll(self) -> None:
        """Sees how it gets on."""
        if self._fleet is None:
            return
        self._fleet.poll(0.0)
        seconds = time.monotonic() - self._begin
        found = self._fleet.ended() or self._fleet.failure()
        if isinstance(found, Ended) and not found.reason:
            self._close(f"the step for {self.size} devices is compiled, after {seconds:.0f} s", True)
        elif found is not None or seconds > _LIMIT_S:
            why = "it takes too long" if found is None else found.reason
            self._close(f"the step for {self.size} devices was not compiled beforehand: {why}", False)

    def end(self) -> bool:
        """Ends it, wherever it is, and returns whether it was still under way."""
        if self._fleet is None:
            return False
        self._fleet.kill()
        self._fleet = None
        return True

    def _close(self, text: str, done: bool) -> None:
        self.end()
        self._events.write("rehearsal", text, devices=self.size, compiled=done)
