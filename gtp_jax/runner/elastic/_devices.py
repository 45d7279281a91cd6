"""The devices of this machine, counted without starting JAX's backend: that is for the processes that use them."""

from __future__ import annotations

import dataclasses
import glob
import os
import subprocess
from collections.abc import Mapping

from ...mesh import has_gpu


@dataclasses.dataclass(frozen=True)
class Device:
    """A device that one process uses.

    Attributes:
        number: its place among the devices of the run, from 0.
        name: for people.
        environment: what gives a process this device and no other.
    """

    number: int
    name: str
    environment: Mapping[str, str]


def uses_gpus(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether JAX will use GPUs on this machine."""
    return has_gpu() and "cpu" not in environment.get("JAX_PLATFORMS", "").split(",")[:1]


def find_devices(virtual: int) -> list[Device]:
    """Returns the NVIDIA GPUs that this process may use, or so many virtual CPU devices if JAX uses none.

    GPUs are named by what `CUDA_VISIBLE_DEVICES` holds, else by their UUIDs: the driver counts anew when one is lost.

    Raises:
        ValueError: if no GPU is visible.
    """
    if not uses_gpus():
        return [Device(i, f"virtual CPU device {i}", {"JAX_PLATFORMS": "cpu"}) for i in range(virtual)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = _uuids() if visible is None else [name for name in visible.split(",") if name]
    if not names:
        raise ValueError(
            "`--elastic` found no NVIDIA GPU: CUDA_VISIBLE_DEVICES is empty, or there is no /dev/nvidia0. Set it to "
            "the GPUs to use, or set JAX_PLATFORMS=cpu for virtual CPU devices."
        )
    return [Device(i, f"GPU {i}", {"CUDA_VISIBLE_DEVICES": name}) for i, name in enumerate(names)]


def _uuids() -> list[str]:
    """Returns the UUIDs of all GPUs; their numbers if nvidia-smi does not answer."""
    query = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        found = []
    return found or [str(i) for i in range(len(glob.glob("/dev/nvidia[0-9]*")))]
