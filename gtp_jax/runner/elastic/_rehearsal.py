"""Compiles the programs of a smaller fleet in advance, so that it will find them in the persistent cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from ..trainer import EventLog, Message
from ._devices import Device
from ._failure import Ended
from ._fleet import Fleet

_LIMIT_S = 900.0


class Rehearsal:
    """Compiles in the background while a fleet trains on the same devices.

    Args:
        devices: the devices of the smaller fleet.
        environment: the environment variables set in all processes.
        order: returns the message for a process, given its index.
        events: the log to which the outcome is written.

    Attributes:
        size: the number of devices of the smaller fleet.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        environment: Mapping[str, str],
        order: Callable[[int], Message],
        events: EventLog,
    ) -> None:
        # the training fleet holds most of the memory, and the compiler needs little
        self._fleet: Fleet | None = Fleet(devices, {**environment, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
        self._fleet.order([device.number for device in devices], order)
        self._events, self.size, self._begin = events, len(devices), time.monotonic()

    def poll(self) -> None:
        """Checks on the processes, and closes the rehearsal when it has finished, failed or run out of time."""
        if self._fleet is None:
            return
        self._fleet.poll(0.0)
        seconds = time.monotonic() - self._begin
        found = self._fleet.ended() or self._fleet.failure()
        if isinstance(found, Ended) and not found.reason:
            self._close(f"compiled the step for {self.size} devices in {seconds:.0f} s", True)
        elif found is not None or seconds > _LIMIT_S:
            why = "compilation takes too long" if found is None else found.reason
            self._close(f"did not compile the step for {self.size} devices in advance: {why}", False)

    def end(self) -> bool:
        """Ends the rehearsal and returns whether it was still running."""
        if self._fleet is None:
            return False
        self._fleet.kill()
        self._fleet = None
        return True

    def _close(self, text: str, done: bool) -> None:
        self.end()
        self._events.write("rehearsal", text, devices=self.size, compiled=done)
