"""Reports skipped steps on the host, because a compiled step can neither raise an error nor warn."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

# The number of skipped steps in a row of which a loop is warned.
MANY = 10


def check_finite(metrics: Mapping[str, Any], step: int | None = None) -> None:
    """Raises an error if a step's loss or the norm of its gradients is not finite. Waits for the step to complete.

    If such a step was made with `skip_nonfinite=True`, the default, it returned the old state. You can save that state,
    or run the step again.

    Args:
        metrics: the metrics that the step returned.
        step: the number of the step, for the message.

    Raises:
        FloatingPointError: if the loss or the norm is not finite; the message names the loss if neither is finite.
    """
    which = "a step" if step is None else f"step {step}"
    for name, what in (("loss", "loss"), ("grad_norm", "gradient norm")):
        if name in metrics and not math.isfinite(value := float(metrics[name])):
            kept = " The update was skipped: the state is unchanged." if bool(metrics.get("skipped", False)) else ""
            raise FloatingPointError(f"the {what} of {which} is {value}.{kept}")


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
