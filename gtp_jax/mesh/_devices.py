"""Chooses the devices of a run (the machine's GPUs or virtual CPU devices) before JAX starts its backend."""

from __future__ import annotations

import glob
import logging
import os

import jax

# Device files of GPUs: NVIDIA, Windows Subsystem for Linux, AMD.
_GPU_FILES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd")


def choose_devices(total: int, *, processes: int = 1, local: int | None = None) -> None:
    """Prepares virtual CPU devices, which JAX uses if it finds no GPU.

    Args:
        total: the number of devices of all processes together.
        processes: the number of processes that share the devices.
        local: the number of virtual devices of this process; an even share of `total` by default.

    Raises:
        ValueError: if the processes cannot share the devices evenly.
    """
    if local is None and total % processes:
        raise ValueError(
            f"{total} virtual CPU devices cannot be shared evenly by {processes} processes. Choose other degrees, or "
            "set the number of devices of each process with --local-devices."
        )
    try:
        jax.config.update("jax_num_cpu_devices", local or total // processes)
        if not has_gpu() and os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
            use_cpu()  # an installed CUDA plugin would look for a driver, and log at length that there is none
    except RuntimeError:
        pass  # the backend is already running; its devices are counted later


def use_cpu() -> None:
    """Makes JAX compute on the CPU, regardless of the environment, and suppresses the logs of broken plugins."""
    jax.config.update("jax_platforms", "cpu")
    # JAX still loads installed plugins, and logs a traceback if one is broken
    logging.getLogger("jax._src.xla_bridge").addFilter(_is_not_of_plugin)


def _is_not_of_plugin(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Jax plugin configuration error")


def has_gpu() -> bool:
    """Returns whether the machine has a GPU, even one that JAX cannot use."""
    return any(map(glob.glob, _GPU_FILES))


def on_gpu() -> bool:
    """Returns whether JAX runs on GPUs. Starts JAX's backend."""
    return jax.default_backend() == "gpu"
