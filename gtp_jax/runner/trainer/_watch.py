"""The interface of watches, which supervise a process while it trains and are notified of what it does."""

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

# The activities of a process. Each lasts until the next one begins; `step` begins again after every step.
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
    """Watches a process of a run. A context manager around everything in which other processes take part."""

    @abc.abstractmethod
    def __enter__(self) -> Self: ...

    @abc.abstractmethod
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...

    @abc.abstractmethod
    def doing(self, activity: Activity, step: int = 0) -> None:
        """Records that the process begins an activity.

        Args:
            activity: the activity that begins.
            step: the number of updates made so far.
        """

    @abc.abstractmethod
    def attend(self, peers: Peers, directory: RunDirectory) -> None:
        """Is called when all processes have agreed, with the directory of the run.

        Args:
            peers: the connections to the other processes.
            directory: the directory of the run.
        """

    @abc.abstractmethod
    def heard(self, process: int, message: Message | None) -> None:
        """Is called with a message from another process; `None` if that process is gone."""

    @abc.abstractmethod
    def leave(self, reason: str, code: int) -> None:
        """Is called, from any thread, when the process is about to exit.

        Args:
            reason: the reason, in plain words.
            code: the exit status.
        """

    @abc.abstractmethod
    def timed(self, what: str, seconds: float) -> None:
        """Is called with the duration of something that waits for no peer, and so can identify a slow process.

        Args:
            what: `input` for the wait for a batch; `dispatch` for the launch of a step; `device` and the device's name
                for matrix products.
            seconds: the duration in seconds.
        """

    @abc.abstractmethod
    def give_up(self, error: Exception, reason: str) -> NoReturn:
        """Ends a process that cannot continue, immediately, so that it does not wait for a peer that hangs.

        Args:
            error: the error that was raised.
            reason: the reason, in plain words.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def source(self, checkpoints: Checkpoints, state_like: Any) -> Checkpoints:
        """Returns the checkpoints from which the state is to be restored, if they have one.

        Args:
            checkpoints: the checkpoints of the run.
            state_like: the shapes and shardings of the state.
        """

    @abc.abstractmethod
    def stepped(self, step: int, state: Any, save: Callable[[Checkpoints], bool]) -> None:
        """Is called after every step, and may take a snapshot.

        Args:
            step: the number of updates made so far.
            state: the train state after these updates.
            save: writes this state as step `step`, and returns whether it did. It does not if a step in flight turns
                out not to be finite, because another step then gets the number.
        """


@dataclasses.dataclass(frozen=True)
class Supervision:
    """The decisions of a supervisor for a process that it has started.

    Attributes:
        watch: the watch that reports to the supervisor what the process does.
        degrees: the degrees of the mesh, which replace those of the configuration; with `faults`, the degrees of the
            healthy mesh.
        faults: the lost devices, whose replicas continue at a lower degree.
        rehearse: whether to only compile the step, into the persistent compilation cache.
        token: the token of the supervisor's lock on the directory of the run.
    """

    watch: Watch
    degrees: Mapping[str, int]
    faults: Faults = Faults()
    rehearse: bool = False
    token: str | None = None

    @property
    def order(self) -> dict[str, Any]:
        """The decisions that determine what is computed, by name, as JSON values."""
        return {
            "degrees": dict(self.degrees),
            "lost devices": list(self.faults.failed_devices or ()),
            "rehearsal": self.rehearse,
        }
