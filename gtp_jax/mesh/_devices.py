"""Chooses the devices of a run, the machine's GPUs or virtual CPU devices, before jax starts its backend."""

from __future__ import annotations

import glob
import os

import jax

# Device files of GPUs: NVIDIA's, Windows' within Linux, AMD's.
_GPU_FILES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd")


def choose_devices(total: int, *, processes: int = 1, local: int | None = None) -> None:
    """Prepares virtual CPU devices, which jax uses if it finds no GPU.

    Args:
        total: how many, over all processes.
        processes: number of processes that share the devices.
        local: virtual devices of this process; an even share by default.

    Raises:
        ValueError: if the processes cannot share the devices evenly.
    """
    if local is None and total % processes:
        raise ValueError(
            f"{total} virtual CPU devices cannot be shared evenly by {processes} processes. Choose other degrees, or "
            "say how many each process has with --local-devices."
        )
    try:
        jax.config.update("jax_num_cpu_devices", local or total // processes)
        if "JAX_PLATFORMS" not in os.environ and not has_gpu():
            # An installed CUDA plugin would look for a driver and complain at length that there is none.
            jax.config.update("jax_platforms", "cpu")
    except RuntimeError:
        pass  # jax runs already, with devices that are counted later


def has_gpu() -> bool:
    """Returns whether the machine has a GPU, usable or not."""
    return any(map(glob.glob, _GPU_FILES))


def on_gpu() -> bool:
    """Returns whether jax runs on GPUs. Starts its backend."""
    return jax.default_backend() == "gpu"
