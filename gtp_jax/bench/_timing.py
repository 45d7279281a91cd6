"""How long a compiled program takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

_ROUND_SECONDS = 0.02
_ROUNDS = 7


def seconds_a_call(function: Callable[..., Any], *args: Any, one_by_one: bool = False) -> float:
    """Median time of a call, over rounds of so many calls that starting and waiting do not count.

    Calls of a round follow one another without waiting; the device is idle only where the host cannot keep up.

    Args:
        function: compiled; run a few times before the clock starts.
        args: arrays, already on the device.
        one_by_one: wait for each call. Virtual CPU devices share threads, and calls with collectives that are in flight
            together wait for one another forever.
    """

    def run(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            out = function(*args)
            if one_by_one:
                jax.block_until_ready(out)
        jax.block_until_ready(out)
        return time.perf_counter() - start

    run(2)
    calls = max(1, round(_ROUND_SECONDS / max(run(1), 1e-6)))
    return statistics.median(run(calls) / calls for _ in range(_ROUNDS))
