"""Describes how a fleet ended."""

from __future__ import annotations

import dataclasses
import signal
from typing import Literal

from ..trainer import Activity

# killed: the process ended without a message. silent: it is alive but sends no heartbeats. stalled: all processes send
# heartbeats, but training makes no progress. device: JAX raised a runtime error. damaged: a snapshot could not be
# restored. unconnected: the processes did not find each other. error: any other exception.
Kind = Literal["killed", "silent", "stalled", "device", "damaged", "unconnected", "error"]

# The failures that a device may have caused. Other exceptions come from the program.
SUSPECTS: tuple[Kind, ...] = ("killed", "silent", "device")


@dataclasses.dataclass(frozen=True)
class Failure:
    """The first failure of a fleet.

    Attributes:
        kind: the kind of failure.
        device: the device number of the process that failed; `None` if no process can be blamed.
        reason: an explanation for the user.
        step: the number of updates that the fleet had made.
        activity: what the process was doing.
        last_sign: when the process was last heard, on the monotonic clock.
        noticed: when the supervisor noticed, on the monotonic clock.
    """

    kind: Kind
    device: int | None
    reason: str
    step: int
    activity: Activity | None
    last_sign: float
    noticed: float


@dataclasses.dataclass(frozen=True)
class Ended:
    """A fleet that ended without a failure.

    Attributes:
        status: the exit status of the run.
        reason: why the fleet refused to go on; empty if it did not refuse.
    """

    status: int
    reason: str = ""


def how_it_ended(code: int) -> str:
    """Returns a description of how a process ended.

    Args:
        code: the exit status of the process; negative if a signal ended it.
    """
    if code >= 0:
        return f"ended with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = "; often the host has run out of memory" if -code == signal.SIGKILL else ""
    return f"was ended by {name}{hint}"
