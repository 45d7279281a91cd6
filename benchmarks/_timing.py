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
    """Returns the median seconds per call, over rounds with enough calls to make the cost of starting and waiting
    negligible.

    Unless `one_by_one`, the calls of a round follow one another without waiting, so the device is idle only if the host
    cannot keep up.

    Args:
        function: the compiled function; it runs a few times before timing starts.
        args: the arguments, arrays that are already on the device.
        one_by_one: whether to wait for each call. This is needed for collectives on virtual CPU devices: they share
            threads, so concurrent calls may deadlock.
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
    """Returns the median seconds per call that a GPU spends in kernels and copies, according to the profiler; on CPUs,
    the result of `seconds_a_call`.

    Meant for calls with so many arguments that the host takes longer to pass them than the GPU takes to compute.

    Args:
        function: the compiled function; it runs once before timing starts.
        args: the arguments, arrays that are already on the device.

    Raises:
        RuntimeError: if the profiler recorded no GPU activity in a round.
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
        raise RuntimeError(
            "the profiler recorded no kernels. Check that CUPTI is installed, and that no other program is profiling."
        )
    return statistics.median(seconds)


def _device_seconds(trace: Path) -> float:
    """Returns the seconds spent in kernels and copies, summed over all streams of a trace."""
    return 1e-9 * sum(
        event.duration_ns
        for plane in jax.profiler.ProfileData.from_file(str(trace)).planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    )
