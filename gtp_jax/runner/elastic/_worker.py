"""One process of a fleet: it trains, and tells the supervisor what it does."""

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
from ..trainer import (
    Activity,
    Diverged,
    LaunchOptions,
    Line,
    LostLock,
    Message,
    NoCoordinator,
    Peers,
    RunDirectory,
    Supervision,
    Watch,
    start,
)
from ._patience import BEAT_S, STARTING_S
from ._snapshots import Cadence, Snapshots

# What the system refuses until a person does something about it.
_LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """What a process of a fleet is to do, JSON on its way to it.

    Attributes:
        settings: of the run, by name.
        processes: of the fleet.
        process: number of this one.
        coordinator: `HOST:PORT` of process 0.
        degrees: of the mesh, or of the healthy one.
        failed: devices that are lost, if replicas are unequal.
        resume: go on with the run in its directory.
        force: replace it.
        virtual: on a virtual CPU device.
        snapshots: directory in memory.
        interval: steps that a failure may cost at most; `None` to choose it by its cost.
        cadence: chosen by an earlier fleet.
        rehearse: only compile.
        token: of the supervisor's lock on the directory.
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
    """Tells the supervisor what this process does, and takes snapshots.

    Args:
        line: to the supervisor.
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
        """Takes these from now on."""
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
        """Tells the supervisor that the run has ended so."""
        del reason
        self._line.send({"kind": "ended", "status": code})

    def timed(self, what: str, seconds: float) -> None:
        """Does nothing: what a supervisor does about a slow process is not decided by it."""

    def doing(self, activity: Activity, step: int = 0) -> None:
        """Tells the supervisor, at once if it is another activity."""
        if activity == "save" and self._snapshots is not None:
            self._snapshots.wait()  # two commits at the same time would wait for each other's processes
        if activity in ("compile", "step"):  # the state has been restored
            self._from_memory = False
        now = time.monotonic()
        with self._lock:
            before, took_s = self._activity, now - self._since
            if before in self._first_over:  # what is done for the first time also compiles
                self._longest[before] = max(took_s, self._longest.get(before, 0.0))
                self._stepping_s += took_s if before == "step" else 0.0
            self._first_over.add(before)
            first_step = before == activity == "step" and "step" not in self._longest
            self._activity, self._step, self._since = activity, step, now
        if before != activity or first_step:
            self._tell()

    def source(self, checkpoints: Checkpoints, state_like: Any) -> Checkpoints:
        """Returns the latest snapshots, unless the checkpoints are later."""
        assert self._snapshots is not None
        chosen = self._snapshots.source(checkpoints, state_like)
        self._from_memory = chosen is not checkpoints
        return chosen

    def stepped(self, step: int, state: Any, save: Callable[[Checkpoints], bool]) -> None:
        """Takes a snapshot if one is due."""
        assert self._snapshots is not None
        self._snapshots.stepped(step, state, save)

    def give_up(self, error: Exception, reason: str) -> NoReturn:
        """Tells the supervisor why, and ends the process."""
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
        """Returns whether the system refused something that it will refuse again: a full disk; text that is not there.
        Other errors of files may be the end of a peer."""
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
        descriptor: of the socket to the supervisor.
    """
    if has_gpu():
        all_reduce_with_nccl()  # before the backend starts, which reads XLA_FLAGS
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
        join_timeout=STARTING_S,  # the supervisor sees sooner who does not come
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
    """Ends this process when the supervisor is gone; on Linux the kernel is quicker."""
    while line.receive() is not None:
        pass
    os._exit(1)
