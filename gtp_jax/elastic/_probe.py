"""Probes: whether a device still computes, asked in a fresh process, because a broken one can hang who asks."""

from __future__ import annotations

import dataclasses
import subprocess
import time
from collections.abc import Sequence

from ._child import kill_group, start_child, wait_s
from ._devices import Device

# Integers that float32 and bfloat16 sum exactly, so that a wrong bit shows.
_CODE = """
import jax, numpy as np
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


def probe(devices: Sequence[Device], timeout_s: float) -> list[Finding]:
    """Lets every device compute, all at the same time, and returns what was found, in order.

    A device is sound if a fresh process that sees only it multiplies two matrices right, within the time.

    Args:
        devices: not in use by a process that keeps their memory.
        timeout_s: seconds after which a probe has failed.
    """
    begin = time.monotonic()
    children = [_start(device) for device in devices]
    return [_finding(device, child, begin, timeout_s) for device, child in zip(devices, children, strict=True)]


class Probe:
    """A probe in the background, of one device.

    Args:
        device: which one.
        timeout_s: seconds after which it has failed.
    """

    def __init__(self, device: Device, timeout_s: float) -> None:
        self.device = device
        self._timeout_s = timeout_s
        self._begin = time.monotonic()
        self._child = _start(device)

    def result(self) -> Finding | None:
        """Returns what was found, or `None` as long as it is under way."""
        if self._child.poll() is None and time.monotonic() - self._begin < self._timeout_s:
            return None
        return _finding(self.device, self._child, self._begin, self._timeout_s)

    def cancel(self) -> None:
        """Ends it."""
        kill_group(self._child)
        self._child.communicate()


def _start(device: Device) -> subprocess.Popen[bytes]:
    kind = "gpu" if "CUDA_VISIBLE_DEVICES" in device.environment else "cpu"
    # the run's processes may hold most of the memory
    environment = {**device.environment, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return start_child(_PREFIX + _CODE, [kind, str(device.number)], environment, quiet=True)


def _finding(device: Device, child: subprocess.Popen[bytes], begin: float, timeout_s: float) -> Finding:
    ended = wait_s(child, begin + timeout_s - time.monotonic())
    if not ended:
        kill_group(child)
        # a process that the driver does not let go would block a read
        wait_s(child, 5.0)
        trouble = f"it has not computed within {timeout_s:.0f} s"
    else:
        assert child.stdout is not None
        said = child.stdout.read().decode(errors="replace").strip().splitlines()
        trouble = "" if child.returncode == 0 and "computes" in said else (said or [f"status {child.returncode}"])[-1]
    return Finding(device, trouble, time.monotonic() - begin)
