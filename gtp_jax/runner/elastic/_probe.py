"""Probes: whether a device still computes, asked in a fresh process, because a broken one can hang who asks."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import time
from collections.abc import Callable, Sequence

from ._child import kill_group, start_child, wait_s
from ._devices import Device
from ._patience import slowness

# Integers that float32 and bfloat16 sum exactly, so that a wrong bit shows.
_CODE = """
import jax, numpy as np
print("imported", flush=True)
jax.config.update("jax_num_cpu_devices", 1)
sides = np.arange(512 * 512, dtype=np.int64).reshape(512, 512)
left, right = sides % 7 - 3, sides % 5 - 2
expected = left @ right
[device] = jax.local_devices()
if sys.argv[1] == "gpu" and device.platform != "gpu":
    sys.exit("JAX finds no GPU")
for dtype in ("float32", "bfloat16"):
    on_device = [jax.device_put(side.astype(np.float32), device).astype(dtype) for side in (left, right)]
    product = jax.jit(lambda a, b: jax.numpy.matmul(a, b, preferred_element_type="float32"))(*on_device)
    if not (np.asarray(product) == expected).all():
        sys.exit(f"a matmul in {dtype} has another result than on the host")
print("computes")
"""
_PREFIX = "import sys\n"
# A device has no part in imports, which wait for the host alone.
_TIMES_FOR_IMPORTS = 10.0


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a probe found.

    Attributes:
        device: which one was probed.
        trouble: what is wrong with it; empty if it computes.
        seconds: that it took.
    """

    device: Device
    trouble: str
    seconds: float


def probe(devices: Sequence[Device], timeout_s: float, meanwhile: Callable[[], object]) -> list[Finding]:
    """Lets every device compute, all at the same time, and returns what was found, in order.

    A device is sound if a fresh process that sees only it multiplies two matrices right, within the time.

    Args:
        devices: not in use by a process that keeps their memory.
        timeout_s: seconds after which a probe has failed, see `Probe`.
        meanwhile: called again and again until all have ended.
    """
    probes = [Probe(device, timeout_s) for device in devices]
    findings: dict[int, Finding] = {}
    while len(findings) < len(probes):
        meanwhile()
        for i, asked in enumerate(probes):
            if i not in findings and (finding := asked.result()) is not None:
                findings[i] = finding
    return [findings[i] for i in range(len(probes))]


class Probe:
    """A probe in the background, of one device.

    Args:
        device: which one.
        timeout_s: seconds after its imports in which it must have computed. Imports that take long show that the host
            has too little time for all processes; then the device has longer, too.
        now: the monotonic clock.
    """

    def __init__(self, device: Device, timeout_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self.device = device
        self._timeout_s, self._now = timeout_s, now
        self._begin = now()
        self._imported_at: float | None = None
        self._said = b""
        self._child = _start(device)

    def result(self) -> Finding | None:
        """Returns what was found, or `None` as long as it is under way."""
        now = self._now()
        ended = self._child.poll() is not None
        said = self._heard()
        if self._imported_at is None and "imported" in said:
            self._imported_at = now
        since, limit_s, what = self._limit()
        if not ended and now - since < limit_s:
            return None
        if ended:
            trouble = "" if self._child.returncode == 0 and "computes" in said else _last(said, self._child.returncode)
        else:
            trouble = f"it has not {what} within {limit_s:.0f} s"
        self.cancel()
        return Finding(self.device, trouble, now - self._begin)

    def cancel(self) -> None:
        """Ends it, if it has not ended."""
        if self._child.poll() is None:
            kill_group(self._child)
            wait_s(self._child, 5.0)  # the driver may not let it go
        assert self._child.stdout is not None
        self._child.stdout.close()

    def _limit(self) -> tuple[float, float, str]:
        """Returns since when it has been at it, for how long it may, and what it must have done then."""
        if self._imported_at is None:
            return self._begin, _TIMES_FOR_IMPORTS * self._timeout_s, "imported JAX"
        return self._imported_at, self._timeout_s * slowness(self._imported_at - self._begin), "computed"

    def _heard(self) -> list[str]:
        """Returns the lines that it has printed so far; does not wait."""
        assert self._child.stdout is not None
        with contextlib.suppress(BlockingIOError):
            while block := os.read(self._child.stdout.fileno(), 1 << 16):
                self._said += block
        return self._said.decode(errors="replace").splitlines()


def _start(device: Device) -> subprocess.Popen[bytes]:
    kind = "gpu" if "CUDA_VISIBLE_DEVICES" in device.environment else "cpu"
    # the run's processes may hold most of the memory
    environment = {**device.environment, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    child = start_child(_PREFIX + _CODE, [kind, str(device.number)], environment, quiet=True)
    assert child.stdout is not None
    os.set_blocking(child.stdout.fileno(), False)
    return child


def _last(said: Sequence[str], status: int) -> str:
    """Returns the last word of a probe that has failed, but for those of one that goes well."""
    lines = [line.strip() for line in said if line.strip() not in ("", "imported", "computes")]
    return lines[-1] if lines else f"status {status}"
