"""Raises on the host what a compiled step can only flag."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def check_finite(metrics: Mapping[str, Any], step: int | None = None) -> None:
    """Raises if a step's loss, or the norm of its gradients, is not finite. Waits for the step to end.

    The state is as it was before that step, see `train_step`: it may be saved, and the step run again.

    Args:
        metrics: as a step returned them.
        step: its number, for the message.

    Raises:
        FloatingPointError: naming what is not finite.
    """
    which = "a step" if step is None else f"step {step}"
    for name, what in (("loss", "loss"), ("grad_norm", "gradient norm")):
        if name in metrics and not math.isfinite(value := float(metrics[name])):
            kept = " The update was left out: the state is as it was." if bool(metrics.get("skipped", False)) else ""
            raise FloatingPointError(f"the {what} of {which} is {value}.{kept}")
