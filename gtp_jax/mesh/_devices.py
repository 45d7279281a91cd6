"""Chooses the devices of a run, the machine's GPUs or virtual CPU devices, before jax starts its backend."""

from __future__ import annotations

import glob
import logging
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
        if not has_gpu() and os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
            use_cpu()  # an installed CUDA plugin would look for a driver and complain at length that there is none
    except RuntimeError:
        pass  # jax runs already, with devices that are counted later


def use_cpu() -> None:
    """Makes jax compute on the CPU, whatever the environment says, and keeps quiet of broken plugins."""
    jax.config.update("jax_platforms", "cpu")
    # jax loads installed plugins all the same, and logs the traceback of one that is broken
    logging.getLogger("jax._src.xla_bridge").addFilter(_is_not_of_plugin)


def _is_not_of_plugin(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Jax plugin configuration error")


def has_gpu() -> bool:
    """Returns whether the machine has a GPU, usable or not."""
    return any(map(glob.glob, _GPU_FILES))


def on_gpu() -> bool:
    """Returns whether jax runs on GPUs. Starts its backend."""
    return jax.default_backend() == "gpu"
