"""One process of a fleet: trains, and reports to the supervisor what it is doing."""

from __future__ import annotations

import dataclasses
import errno
import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Self

import jax

from ...checkpoint import Checkpoints
from ...mesh import has_gpu
from ...train import all_reduce_with_nccl
from .._exit_codes import of_error, out_of_memory
from ..flags import Faults
from ..launch import LaunchOptions, NoCoordinator
from ..trainer import (
    Activity,
    Diverged,
    Line,
    LostLock,
    Message,
    Peers,
    RunDirectory,
    Supervision,
    Watch,
    start,
)
from ._patience import BEAT_S, STARTING_S
from ._snapshots import Cadence, Snapshots

# The errors of the operating system that persist until someone intervenes.
_LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """The supervisor's instructions for one process of a fleet, which receives them as JSON.

    Attributes:
        settings: the settings of the run, by name.
        processes: the number of processes in the fleet.
        process: the index of this process.
        coordinator: the `HOST:PORT` of process 0.
        degrees: the degrees of the mesh by axis; those of the healthy mesh if replicas are unequal.
        failed: the numbers of the lost devices if replicas are unequal.
        resume: whether to continue the run in its directory.
        force: whether to replace the run in its directory.
        virtual: whether to use a virtual CPU device.
        snapshots: the in-memory directory of the snapshots.
        interval: the most steps that a failure may cost; `None` to choose by the measured cost of snapshots.
        cadence: the cadence that an earlier fleet chose, or `None`.
        rehearse: whether to only compile.
        token: the token of the supervisor's lock on the directory.
        at: the step to resume from; the latest by default.
    """

    settings: dict[str, Any]
    processes: int
    process: int
    coordinator: str
    degrees: dict[str, int]
    failed: list[int]
    resume: bool
    force: bool
    virtual: bool
    snapshots: str
    interval: int | None
    cadence: dict[str, int] | None
    rehearse: bool
    token: str
    at: int | None


class SupervisedWatch(Watch):
    """Reports to the supervisor what this process is doing, and takes snapshots.

    Args:
        line: the connection to the supervisor.
    """

    def __init__(self, line: Line) -> None:
        self._line = line
        self._lock = threading.Lock()
        self._activity: Activity = "start"
        self._step = 0
        self._since = time.monotonic()
        self._longest: dict[str, float] = {}
        self._first_over: set[str] = set()
        self._stepping_s = 0.0
        self._snapshots: Snapshots | None = None
        self._from_memory = False
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def take_snapshots(self, snapshots: Snapshots) -> None:
        """Uses these snapshots from now on."""
        self._snapshots = snapshots

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._snapshots is not None:
            self._snapshots.close()

    def attend(self, peers: Peers, directory: RunDirectory) -> None:
        """Does nothing: the supervisor watches all processes."""

    def heard(self, process: int, message: Message | None) -> None:
        """Does nothing."""

    def leave(self, reason: str, code: int) -> None:
        """Tells the supervisor that the run has ended with this status."""
        del reason
        self._line.send({"kind": "ended", "status": code})

    def timed(self, what: str, seconds: float) -> None:
        """Does nothing: the supervisor does not act on these times."""

    def doing(self, activity: Activity, step: int = 0) -> None:
        """Records the current activity, and reports it at once if it has changed or the first step has ended."""
        if activity == "save" and self._snapshots is not None:
            self._snapshots.wait()  # concurrent commits would wait for each other's processes
        if activity in ("compile", "step"):  # the state has been restored
            self._from_memory = False
        now = time.monotonic()
        with self._lock:
            before, took_s = self._activity, now - self._since
            if before in self._first_over:  # the first time includes compilation
                self._longest[before] = max(took_s, self._longest.get(before, 0.0))
                self._stepping_s += took_s if before == "step" else 0.0
            self._first_over.add(before)
            first_step = before == activity == "step" and "step" not in self._longest
            self._activity, self._step, self._since = activity, step, now
        if before != activity or first_step:
            self._tell()

    def source(self, checkpoints: Checkpoints, state_like: Any) -> Checkpoints:
        """Returns the snapshots, or the checkpoints if the latest of them is newer."""
        assert self._snapshots is not None
        chosen = self._snapshots.source(checkpoints, state_like)
        self._from_memory = chosen is not checkpoints
        return chosen

    def stepped(self, step: int, state: Any, save: Callable[[Checkpoints], bool]) -> None:
        """Takes a snapshot if one is due."""
        assert self._snapshots is not None
        self._snapshots.stepped(step, state, save)

    def give_up(self, error: Exception, reason: str) -> NoReturn:
        """Tells the supervisor the reason, and ends the process."""
        if self._from_memory and isinstance(error, ValueError):
            cause = "damaged"
        elif isinstance(error, NoCoordinator):
            cause = "unconnected"
        elif isinstance(error, Diverged):
            cause = "diverged"
        elif isinstance(error, (ValueError, ModuleNotFoundError, LostLock)) or self._is_refusal(error):
            cause = "refused"
        else:
            device = isinstance(error, jax.errors.JaxRuntimeError)
            cause = "refused" if out_of_memory(error) else "device" if device else "error"
        self._line.send({"kind": "failed", "cause": cause, "reason": reason, "code": of_error(error)})
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def _is_refusal(self, error: Exception) -> bool:
        """Returns whether this is an operating-system error that would recur, such as a full disk or a missing text
        file. Other I/O errors may result from the death of a peer."""
        return isinstance(error, OSError) and (error.errno in _LASTING or self._activity in ("start", "check"))

    def _beat(self) -> None:
        while True:
            self._tell()
            time.sleep(BEAT_S)

    def _tell(self) -> None:
        with self._lock:
            message = {
                "kind": "beat",
                "activity": self._activity,
                "step": self._step,
                "busy_s": time.monotonic() - self._since,
                "longest_s": self._longest.get(self._activity),
                "stepping_s": self._stepping_s,
            }
        self._line.send(message)


def work(descriptor: int) -> NoReturn:
    """Runs a process of a fleet: waits for its order, trains, and ends.

    Args:
        descriptor: the file descriptor of the socket to the supervisor.
    """
    if has_gpu():
        all_reduce_with_nccl()  # before the backend starts, because the backend reads XLA_FLAGS
    line = Line(socket.socket(fileno=descriptor))
    watch = SupervisedWatch(line)
    messages: list[Message] | None = []
    while messages == []:
        messages = line.receive()
    if messages is None:
        os._exit(1)
    order = Order(**messages[0])
    threading.Thread(target=_end_with_supervisor, args=(line,), name="supervisor", daemon=True).start()
    faulthandler.enable()
    directory = Path(order.snapshots)
    cadence = None if order.cadence is None else Cadence(**order.cadence)
    report = (lambda found: line.send({"kind": "cadence", **found})) if order.process == 0 else (lambda _: None)
    watch.take_snapshots(Snapshots(directory, order.interval, cadence, report))
    several = order.processes > 1
    options = LaunchOptions(
        coordinator=order.coordinator if several else None,
        num_processes=order.processes if several else None,
        process_id=order.process if several else None,
        local_devices=1 if order.virtual else None,
        join_timeout=STARTING_S,  # the supervisor notices missing processes sooner
    )
    faults = Faults(failed_devices=tuple(order.failed))
    supervision = Supervision(watch, order.degrees, faults, order.rehearse, order.token)
    try:
        status = start(
            order.settings, options, resume=order.resume, force=order.force, at=order.at, supervision=supervision
        )
    except Exception as error:
        watch.give_up(error, f"{type(error).__name__}: {error}" if not str(error) else str(error))
    line.send({"kind": "ended", "status": status})
    sys.exit(0)


def _end_with_supervisor(line: Line) -> NoReturn:
    """Ends this process when the supervisor has died; on Linux the kernel does so sooner."""
    while line.receive() is not None:
        pass
    os._exit(1)
