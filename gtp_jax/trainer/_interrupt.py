"""Ctrl-C and SIGTERM end a run after the step, not within it."""

from __future__ import annotations

import os
import signal
from typing import Any, Self

import jax
from jax.experimental import multihost_utils


class Interrupt:
    """Asks a run to stop. A context manager, for the main thread.

    A single process stops after the step in which the signal came. Of several, all stop after the same step, which jax
    negotiates: it listens for SIGTERM in any of them, and Ctrl-C is passed on as that. A second Ctrl-C ends the process
    at once.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._several = jax.process_count() > 1
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        caught = (signal.SIGINT,) if self._several else (signal.SIGINT, signal.SIGTERM)
        self._before = {number: signal.signal(number, self._note) for number in caught}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def requested(self, step: int) -> bool:
        """Returns whether to stop before this step; to be asked before every step, by all processes."""
        if not self._several:
            return self.signal is not None
        if not multihost_utils.reached_preemption_sync_point(step):
            return False
        self.signal = self.signal or signal.SIGTERM
        return True

    def _note(self, number: int, frame: Any) -> None:
        del frame
        self.signal = signal.Signals(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)
