"""Names the processes and devices that are slow, by times that wait for no peer: step times are equal on all."""

from __future__ import annotations

import collections
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ._watch import Watch

# Medians over so many steps, so that a single pause names nobody.
_STEPS = 20
_FEWEST = 5
_FEWEST_PROBES = 3
# How much slower than the others counts, and how much of a step it must cost.
_TIMES = 2.0
_OF_A_STEP = 0.1
_DEVICE_TIMES = 1.5

# Products of some milliseconds on a large GPU, beside which a launch is nothing.
_SIZE = 4096
_PRODUCTS = 8
_TRIALS = 5

Times = Mapping[str, float]


class Stopwatch:
    """The times of one process, by what it did."""

    def __init__(self) -> None:
        self._seconds: dict[str, collections.deque[float]] = collections.defaultdict(
            lambda: collections.deque(maxlen=_STEPS)
        )

    def add(self, what: str, seconds: float) -> None:
        """Adds a time."""
        self._seconds[what].append(seconds)

    def medians(self) -> dict[str, float]:
        """Returns the median of each time of which enough are known; of devices' fewer, each the least of several."""
        return {
            what: statistics.median(list(seconds))
            for what, seconds in list(self._seconds.items())
            if len(seconds) >= (_FEWEST_PROBES if what.startswith("device") else _FEWEST)
        }


def slow(times: Mapping[int, Times]) -> list[str]:
    """Returns who is slow, in words: `process 1: input takes 120.0 ms a step, 3.1 ms in the others`.

    Args:
        times: seconds by process and by what it did, `step` among it; of devices by `device` and their name.
    """
    lines = []
    step_s = max((of["step"] for of in times.values() if "step" in of), default=0.0)
    for what in ("input", "dispatch"):
        known = {process: of[what] for process, of in times.items() if what in of}
        for process, seconds, others in _apart(known, _TIMES, _OF_A_STEP * step_s):
            lines.append(f"process {process}: {what} takes {seconds:.1f} ms a step, {others:.1f} ms in the others")
    devices = {(p, what): s for p, of in times.items() for what, s in of.items() if what.startswith("device")}
    for (process, device), seconds, others in _apart(devices, _DEVICE_TIMES, 0.0):
        lines.append(
            f"process {process}: {device} takes {seconds:.2f} ms for products that take {others:.2f} ms on others"
        )
    return lines


def _apart[K](known: Mapping[K, float], times: float, least: float) -> Iterator[tuple[K, float, float]]:
    """Yields what takes longer than the median of all others, with both in ms."""
    for key, seconds in known.items():
        others = [other for who, other in known.items() if who != key]
        if others:
            usual = statistics.median(others)
            if seconds > times * usual and seconds - usual > least:
                yield key, 1e3 * seconds, 1e3 * usual


def timed_batches[B](watch: Watch, batches: Iterable[B]) -> Iterator[B]:
    """Yields batches, and tells how long the process waited for each."""
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
    """Times products of matrices on each local device. To be used while no step is under way."""

    def __init__(self) -> None:
        self._programs = {}
        for device in jax.local_devices():
            with jax.set_mesh(Mesh(np.array([device]), ("local",))):
                x = jax.device_put(jnp.full((_SIZE, _SIZE), 1 / _SIZE, jnp.bfloat16), device)
                program = jax.jit(_products).lower(x).compile()
                program(x).block_until_ready()  # the first one also loads it
                self._programs[f"device {device}"] = program, x

    def __call__(self, watch: Watch) -> None:
        """Tells the least of several times of each device, which load from elsewhere disturbs least."""
        for name, (program, x) in self._programs.items():
            seconds = []
            for _ in range(_TRIALS):
                began = time.perf_counter()
                program(x).block_until_ready()
                seconds.append(time.perf_counter() - began)
            watch.timed(name, min(seconds))


def _products(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, _PRODUCTS, lambda _, y: y @ x, x)
