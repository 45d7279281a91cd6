"""Finds the devices of this machine without starting the JAX backend, which only the training processes start."""

from __future__ import annotations

import dataclasses
import glob
import os
import subprocess
from collections.abc import Mapping

from ...mesh import has_gpu


@dataclasses.dataclass(frozen=True)
class Device:
    """A device, used by one process.

    Attributes:
        number: the index of the device in the run, from 0.
        name: the name shown to users.
        environment: the environment variables that make this the only device a process sees.
    """

    number: int
    name: str
    environment: Mapping[str, str]


def uses_gpus(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether JAX will use GPUs on this machine."""
    return has_gpu() and "cpu" not in environment.get("JAX_PLATFORMS", "").split(",")[:1]


def find_devices(virtual: int) -> list[Device]:
    """Returns the NVIDIA GPUs that this process may use, or `virtual` virtual CPU devices if JAX uses no GPUs.

    GPUs are identified by the entries of `CUDA_VISIBLE_DEVICES`, otherwise by their UUIDs, because the driver renumbers
    them when one is lost.

    Raises:
        ValueError: if no GPU is visible.
    """
    if not uses_gpus():
        return [Device(i, f"virtual CPU device {i}", {"JAX_PLATFORMS": "cpu"}) for i in range(virtual)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = _uuids() if visible is None else [name for name in visible.split(",") if name]
    if not names:
        raise ValueError(
            "`--elastic` found no NVIDIA GPU: CUDA_VISIBLE_DEVICES is empty, or /dev/nvidia0 does not exist. Set "
            "CUDA_VISIBLE_DEVICES to the GPUs to use, or set JAX_PLATFORMS=cpu for virtual CPU devices."
        )
    return [Device(i, f"GPU {i}", {"CUDA_VISIBLE_DEVICES": name}) for i, name in enumerate(names)]


def _uuids() -> list[str]:
    """Returns the UUIDs of all GPUs, or their indices if nvidia-smi does not answer."""
    query = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        found = []
    return found or [str(i) for i in range(len(glob.glob("/dev/nvidia[0-9]*")))]
