"""Checks that a state can be kept partly in the memory of the host."""

from __future__ import annotations

import numpy as np
import optax

from ...mesh import of_all_processes
from ...train import TrainState, check_host, check_update


def check_offloaded(state: TrainState, optimizer: optax.GradientTransformation) -> None:
    """Checks an abstract state of which the host keeps a part. All processes must call it. Compiles nothing.

    Raises:
        ValueError: if the optimizer's update cannot be computed in blocks, or the host of a process has too little
            memory; the message says how much is needed.
    """
    check_update(state, optimizer)
    refused = None
    try:
        check_host((state.params, state.opt_state))
    except ValueError as error:
        refused = error
    others = of_all_processes(np.bool_(refused is not None))
    if refused is not None:
        raise refused
    if others.any():
        raise ValueError(
            f"the host of process {int(others.argmax())} has too little memory for --offload; its own output says how "
            "much is needed."
        )
