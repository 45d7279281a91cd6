"""The watch over a process that has no peers and is not part of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Self

from ..checkpoint import Checkpoints
from ._directory import RunDirectory
from ._line import Message
from ._peers import Peers
from ._watch import Activity, Watch


class Unwatched(Watch):
    """Does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        del kind

    def doing(self, activity: Activity, step: int = 0) -> None:
        """Does nothing."""

    def attend(self, peers: Peers, directory: RunDirectory) -> None:
        """Does nothing."""

    def heard(self, process: int, message: Message | None) -> None:
        """Does nothing."""

    def leave(self, reason: str, code: int) -> None:
        """Does nothing."""

    def timed(self, what: str, seconds: float) -> None:
        """Does nothing."""

    def give_up(self, error: Exception, reason: str) -> NoReturn:
        """Raises the error."""
        del reason
        raise error

    def source(self, checkpoints: Checkpoints, state_like: Any) -> Checkpoints:
        """Returns the checkpoints."""
        del state_like
        return checkpoints

    def stepped(self, step: int, state: Any, save: Callable[[Checkpoints], None]) -> None:
        """Does nothing."""
