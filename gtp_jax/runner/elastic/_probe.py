"""Probes whether a device still computes, in a fresh process because a broken device can hang whoever asks it."""

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

# Uses integers that float32 and bfloat16 add exactly, so that any wrong bit shows.
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
        sys.exit(f"the result of a {dtype} matmul differs from the host's")
print("computes")
"""
_PREFIX = "import sys\n"
# Imports do not use the device; how long they take depends on the host alone.
_TIMES_FOR_IMPORTS = 10.0


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of a probe.

    Attributes:
        device: the device that was probed.
        trouble: what is wrong with the device; empty if it computes.
        seconds: how long the probe took.
    """

    device: Device
    trouble: str
    seconds: float


def probe(devices: Sequence[Device], timeout_s: float, meanwhile: Callable[[], object]) -> list[Finding]:
    """Probes all devices at the same time and returns the findings in the order of `devices`.

    A device is healthy if a fresh process that sees only this device multiplies two matrices correctly within the time
    limit.

    Args:
        devices: the devices to probe; no other process may occupy their memory.
        timeout_s: the seconds after which a probe has failed; see `Probe`.
        meanwhile: a function called repeatedly until all probes have ended.
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
    """A probe of one device that runs in the background.

    Args:
        device: the device to probe.
        timeout_s: the seconds that the device has to compute, counted from the end of the imports. Slow imports show
            that the host is overloaded; the limit is then extended.
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
        """Returns the finding, or `None` while the probe is still running."""
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
        """Ends the probe if it is still running."""
        if self._child.poll() is None:
            kill_group(self._child)
            wait_s(self._child, 5.0)  # it may be stuck in the driver
        assert self._child.stdout is not None
        self._child.stdout.close()

    def _limit(self) -> tuple[float, float, str]:
        """Returns when the current phase began, its time limit in seconds, and what it must achieve."""
        if self._imported_at is None:
            return self._begin, _TIMES_FOR_IMPORTS * self._timeout_s, "imported JAX"
        return self._imported_at, self._timeout_s * slowness(self._imported_at - self._begin), "computed"

    def _heard(self) -> list[str]:
        """Returns the lines printed so far, without waiting."""
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
    """Returns the last line that a failed probe printed, ignoring the lines that every successful probe prints."""
    lines = [line.strip() for line in said if line.strip() not in ("", "imported", "computes")]
    return lines[-1] if lines else f"status {status}"
