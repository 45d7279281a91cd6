"""Times compiled programs."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

_ROUND_SECONDS = 0.02
_ROUNDS = 7


def seconds_a_call(function: Callable[..., Any], *args: Any, one_by_one: bool = False) -> float:
    """Returns the median time of a call, over rounds of so many calls that starting and waiting do not count.

    Calls of a round follow one another without waiting; the device is idle only where the host cannot keep up.

    Args:
        function: compiled; run a few times before the clock starts.
        args: arrays, already on the device.
        one_by_one: wait for each call. Virtual CPU devices share threads, and calls with collectives that are in flight
            together wait for one another forever.
    """

    def run(calls: int) -> float:
        out, start = None, time.perf_counter()
        for _ in range(calls):
            out = function(*args)
            if one_by_one:
                jax.block_until_ready(out)
        jax.block_until_ready(out)
        return time.perf_counter() - start

    run(2)
    calls = max(1, round(_ROUND_SECONDS / max(run(1), 1e-6)))
    return statistics.median(run(calls) / calls for _ in range(_ROUNDS))


def seconds_on_device(function: Callable[..., Any], *args: Any) -> float:
    """Returns the median time of a call that a GPU spends in its kernels, by the profiler; on a CPU, `seconds_a_call`.

    For calls whose arguments take the host longer than the device takes for the work, which matters only where the
    device would wait for the host.

    Args:
        function: compiled.
        args: arrays, already on the device.

    Raises:
        RuntimeError: if the profiler recorded nothing of the GPU.
    """
    if jax.default_backend() == "cpu":
        return seconds_a_call(function, *args)
    jax.block_until_ready(function(*args))
    seconds = []
    for _ in range(_ROUNDS):
        with tempfile.TemporaryDirectory() as directory:
            with jax.profiler.trace(directory):
                jax.block_until_ready(function(*args))
            seconds.append(sum(_device_seconds(path) for path in Path(directory).rglob("*.xplane.pb")))
    if not all(seconds):
        raise RuntimeError("the profiler recorded no kernel; is another program profiling, or CUPTI missing?")
    return statistics.median(seconds)


def _device_seconds(trace: Path) -> float:
    """Returns the time in kernels and copies of all streams of a trace."""
    return 1e-9 * sum(
        event.duration_ns
        for plane in jax.profiler.ProfileData.from_file(str(trace)).planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    )
