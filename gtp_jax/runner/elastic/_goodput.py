"""Goodput: the share of time spent on steps that were kept."""

from __future__ import annotations

import time


class Goodput:
    """Adds up the time of steps, leaving out steps that were lost.

    The first step of each fleet is not counted, because it includes the warm-up.
    """

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._kept_s = 0.0
        self._at_commit: dict[int, float] = {}

    def commit(self, step: int, stepping_s: float) -> None:
        """Records how long this fleet's steps took up to a snapshot or checkpoint."""
        self._at_commit[step] = stepping_s

    def restart(self, step: int) -> None:
        """Closes a fleet's account: its progress beyond `step` is lost."""
        self._kept_s += max((s for at, s in self._at_commit.items() if at <= step), default=0.0)
        self._at_commit.clear()

    def share(self, stepping_s: float = 0.0) -> float:
        """Returns the goodput so far, including the steps of the current fleet."""
        return (self._kept_s + stepping_s) / max(1e-9, time.monotonic() - self._begin)
