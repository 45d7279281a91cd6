"""Warns of steps that are all skipped, which a compiled program cannot do itself."""

from __future__ import annotations

import warnings
from collections import deque
from typing import Any

import jax
import numpy as np

# The number of skipped steps in a row of which a loop is warned.
MANY = 10


class Skips:
    """Counts skipped steps, and warns once if `MANY` in a row were skipped.

    It never waits: it reads whether a step was skipped when a later step is launched and the device is done with it.
    """

    def __init__(self) -> None:
        self._pending: deque[Any] = deque(maxlen=4 * MANY)
        self._row, self._warned = 0, False

    def note(self, skipped: Any, *, stacklevel: int) -> None:
        """Takes the metric `skipped` of a step that was just launched, and warns at the call that `stacklevel` names,
        as in `warnings.warn`."""
        if self._warned or not isinstance(skipped, jax.Array):
            return
        skipped.copy_to_host_async()
        self._pending.append(skipped)
        while self._pending and self._pending[0].is_ready():
            one = self._pending.popleft()
            self._row = self._row + 1 if np.asarray(one.addressable_shards[0].data) else 0
        if self._row >= MANY:
            self._warned = True
            self._pending.clear()
            warnings.warn(
                f"{MANY} steps in a row were skipped, so nothing is trained: their loss or a gradient is not finite "
                "(`metrics['skipped']`). Find the cause with `gtp_jax.train.diagnose(loss, state, batch)`, raise "
                "an error with `gtp_jax.train.check_finite(metrics)`, or pass `skip_nonfinite=False` if the optimizer "
                "must see such gradients.",
                stacklevel=stacklevel,
            )
