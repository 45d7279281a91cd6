"""Goodput: the share of the time in which steps were made that count."""

from __future__ import annotations

import time


class Goodput:
    """Counts the time of steps, and takes back that of steps that were lost.

    A fleet's first step is not counted: it also warms up.
    """

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._kept_s = 0.0
        self._at_commit: dict[int, float] = {}

    def commit(self, step: int, stepping_s: float) -> None:
        """Notes how long the steps of this fleet up to a snapshot or checkpoint took."""
        self._at_commit[step] = stepping_s

    def restart(self, step: int) -> None:
        """Ends a fleet's account: what it has made beyond `step` is lost."""
        self._kept_s += max((s for at, s in self._at_commit.items() if at <= step), default=0.0)
        self._at_commit.clear()

    def share(self, stepping_s: float = 0.0) -> float:
        """Returns the goodput until now, the last fleet's steps included."""
        return (self._kept_s + stepping_s) / max(1e-9, time.monotonic() - self._begin)
