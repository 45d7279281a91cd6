"""What looks after a process while it trains, and is told what the process does."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NoReturn, Self

from ...checkpoint import Checkpoints
from ..flags import Faults
from ._directory import RunDirectory
from ._json_socket import Message
from ._peers import Peers

# What a process does. Each lasts until the next begins; `step` begins again after every step.
Activity = Literal[
    "start",
    "check",
    "join",
    "initialize",
    "restore",
    "compile",
    "step",
    "evaluate",
    "save",
    "snapshot",
    "diagnose",
]


class Watch(abc.ABC):
    """Looks after a process of a run. A context manager around everything that other processes take part in."""

    @abc.abstractmethod
    def __enter__(self) -> Self: ...

    @abc.abstractmethod
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...

    @abc.abstractmethod
    def doing(self, activity: Activity, step: int = 0) -> None:
        """Notes what the process does from now on.

        Args:
            activity: what begins.
            step: updates made so far.
        """

    @abc.abstractmethod
    def attend(self, peers: Peers, directory: RunDirectory) -> None:
        """Is told when all processes have agreed, and where the run is.

        Args:
            peers: the others.
            directory: of the run.
        """

    @abc.abstractmethod
    def heard(self, process: int, message: Message | None) -> None:
        """Is told what another process says; `None` when it is gone."""

    @abc.abstractmethod
    def leave(self, reason: str, code: int) -> None:
        """Is told that the process is about to end itself, from any thread.

        Args:
            reason: in plain words.
            code: exit status.
        """

    @abc.abstractmethod
    def timed(self, what: str, seconds: float) -> None:
        """Is told how long something took that waits for no peer, so that it tells a slow process from the others.

        Args:
            what: `input`, the wait for a batch; `dispatch`, the launch of a step; `device` and its name, a product.
            seconds: that it took.
        """

    @abc.abstractmethod
    def give_up(self, error: Exception, reason: str) -> NoReturn:
        """Ends the process at once, because it cannot go on: a peer that hangs must not keep it.

        Args:
            error: what was raised.
            reason: the same in plain words.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def source(self, checkpoints: Checkpoints, state_like: Any) -> Checkpoints:
        """Returns where the state is to be restored from, if there is something.

        Args:
            checkpoints: of the run.
            state_like: shapes and shardings of the state.
        """

    @abc.abstractmethod
    def stepped(self, step: int, state: Any, save: Callable[[Checkpoints], bool]) -> None:
        """Is told after every step; the place for a snapshot.

        Args:
            step: updates made so far.
            state: the train state after them.
            save: writes this state as step `step`, and returns whether it did: a step in flight may turn out not to
                be finite, and another one gets its number.
        """


@dataclasses.dataclass(frozen=True)
class Supervision:
    """What a supervisor decides for a process that it has started.

    Attributes:
        watch: tells the supervisor what the process does.
        degrees: of the mesh, in place of those of the configuration; those of the healthy mesh if there are `faults`.
        faults: devices that are lost, whose replicas go on at a lower degree.
        rehearse: only compile the step, into the persistent compilation cache.
        token: of the supervisor's lock on the directory of the run.
    """

    watch: Watch
    degrees: Mapping[str, int]
    faults: Faults = Faults()
    rehearse: bool = False
    token: str | None = None

    @property
    def order(self) -> dict[str, Any]:
        """What decides what is computed, by name, JSON."""
        return {
            "degrees": dict(self.degrees),
            "lost devices": list(self.faults.failed_devices or ()),
            "rehearsal": self.rehearse,
        }
