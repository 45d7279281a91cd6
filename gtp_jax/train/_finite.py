"""Checks a step's metrics on the host, because a compiled step cannot raise an error itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


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
