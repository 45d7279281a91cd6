"""Finds slow processes and devices from durations that wait for no peer, because step times are equal on all."""

from __future__ import annotations

import collections
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ._watch import Watch

# The number of steps of a median, so that a single pause does not count.
_STEPS = 20
_FEWEST = 5
_FEWEST_PROBES = 3
# A process is slow if it takes this many times as long as the others, and this share of a step longer.
_TIMES = 2.0
_OF_A_STEP = 0.1
_DEVICE_TIMES = 1.5

# Matrix products that take some milliseconds on a large GPU, so that the launch is negligible.
_SIZE = 4096
_PRODUCTS = 8
_TRIALS = 5

Times = Mapping[str, float]


class Stopwatch:
    """Collects the durations of one process, by kind."""

    def __init__(self) -> None:
        self._seconds: dict[str, collections.deque[float]] = collections.defaultdict(
            lambda: collections.deque(maxlen=_STEPS)
        )

    def add(self, what: str, seconds: float) -> None:
        """Adds a duration."""
        self._seconds[what].append(seconds)

    def medians(self) -> dict[str, float]:
        """Returns the median of each kind with enough durations.

        Devices need fewer, because each of their durations is already the least of several.
        """
        return {
            what: statistics.median(list(seconds))
            for what, seconds in list(self._seconds.items())
            if len(seconds) >= (_FEWEST_PROBES if what.startswith("device") else _FEWEST)
        }


def slow(times: Mapping[int, Times], named: Callable[[Sequence[int]], str]) -> list[str]:
    """Describes the slow processes and devices: `process 1: input takes 120.0 ms per step, and 3.1 ms in the others`.

    Args:
        times: the seconds of each process by kind, which includes `step`; for devices, the kind is `device` and a name.
        named: returns processes for messages.
    """
    lines = []
    step_s = max((of["step"] for of in times.values() if "step" in of), default=0.0)
    for what in ("input", "dispatch"):
        known = {process: of[what] for process, of in times.items() if what in of}
        for process, seconds, others in _apart(known, _TIMES, _OF_A_STEP * step_s):
            lines.append(
                f"{named([process])}: {what} takes {seconds:.1f} ms per step, and {others:.1f} ms in the others"
            )
    devices = {(p, what): s for p, of in times.items() for what, s in of.items() if what.startswith("device")}
    for (process, device), seconds, others in _apart(devices, _DEVICE_TIMES, 0.0):
        lines.append(
            f"{named([process])}: {device} takes {seconds:.2f} ms for matrix products that take {others:.2f} ms on "
            "others"
        )
    return lines


def _apart[K](known: Mapping[K, float], times: float, least: float) -> Iterator[tuple[K, float, float]]:
    """Yields each key that takes longer than the median of the others, with its duration and that median in ms."""
    for key, seconds in known.items():
        others = [other for who, other in known.items() if who != key]
        if others:
            usual = statistics.median(others)
            if seconds > times * usual and seconds - usual > least:
                yield key, 1e3 * seconds, 1e3 * usual


def timed_batches[B](watch: Watch, batches: Iterable[B]) -> Iterator[B]:
    """Yields batches, and reports to `watch` how long the process waited for each."""
    iterator = iter(batches)
    while True:
        began = time.perf_counter()
        try:
            batch = next(iterator)
        except StopIteration:
            return
        watch.timed("input", time.perf_counter() - began)
        yield batch


class DeviceProbe:
    """Times matrix products on each local device. Use it only while no step is running."""

    def __init__(self) -> None:
        self._programs = {}
        for device in jax.local_devices():
            with jax.set_mesh(Mesh(np.array([device]), ("local",))):
                x = jax.device_put(jnp.full((_SIZE, _SIZE), 1 / _SIZE, jnp.bfloat16), device)
                program = jax.jit(_products).lower(x).compile()
                program(x).block_until_ready()  # the first one also loads it
                self._programs[f"device {device}"] = program, x

    def __call__(self, watch: Watch) -> None:
        """Reports the least of several durations of each device, the one least affected by other load."""
        for name, (program, x) in self._programs.items():
            seconds = []
            for _ in range(_TRIALS):
                began = time.perf_counter()
                program(x).block_until_ready()
                seconds.append(time.perf_counter() - began)
            watch.timed(name, min(seconds))


def _products(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, _PRODUCTS, lambda _, y: y @ x, x)
