"""What ended a fleet."""

from __future__ import annotations

import dataclasses
import signal
from typing import Literal

from ..trainer import Activity

# killed: the process is gone, and said nothing. silent: it is there, and its beats are not. stalled: all beat, and
# nothing gets on. device: JAX raised an error at run time. damaged: a snapshot does not read as it was written.
# unconnected: the processes did not find each other. error: any other exception.
Kind = Literal["killed", "silent", "stalled", "device", "damaged", "unconnected", "error"]

# A failure of which the device may be the cause. An exception is the program's.
SUSPECTS: tuple[Kind, ...] = ("killed", "silent", "device")


@dataclasses.dataclass(frozen=True)
class Failure:
    """The first failure of a fleet.

    Attributes:
        kind: what happened.
        device: number of the device of the process that failed; `None` if no process can be named.
        reason: for people.
        step: updates that the fleet had made.
        activity: what the process did.
        last_sign: when the process was heard last, on the monotonic clock.
        noticed: when the supervisor knew.
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
    """A fleet that has ended as it should.

    Attributes:
        status: of the run.
        reason: what it refused; empty if nothing.
    """

    status: int
    reason: str = ""


def how_it_ended(code: int) -> str:
    """Returns how a process ended, for people.

    Args:
        code: its exit status; negative for a signal.
    """
    if code >= 0:
        return f"ended with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = "; often the host has run out of memory" if -code == signal.SIGKILL else ""
    return f"was ended by {name}{hint}"
