"""Keeps the last stamps of each device in memory that other processes of the host can read."""

from __future__ import annotations

import atexit
import contextlib
import functools
import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .. import native
from ..mesh import platform

# Memory that GPUs write to must be in a file system that is itself in memory.
_FOLDER = Path("/dev/shm")


class Stamps:
    """The last stamps of each device of a process, which the devices write themselves.

    Args:
        path: the file that is shared with the process.
    """

    def __init__(self, path: Path) -> None:
        devices, kept, self._bits = native.record_sizes()
        size = devices * kept * 8
        with open(path, "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), size)
        self._words = np.frombuffer(self.memory, np.uint64).reshape(devices, kept)

    def of(self, device: Any) -> list[tuple[int, int]]:
        """Returns the last stamps of a local device in order: for each, its number and its id."""
        gpu = device.platform == "gpu"
        return self._row((device.local_hardware_id if gpu else device.id) % len(self._words))

    def each(self) -> list[list[tuple[int, int]]]:
        """Returns the last stamps of each device that has any."""
        return [own for own in map(self._row, range(len(self._words))) if own]

    def _row(self, row: int) -> list[tuple[int, int]]:
        words = sorted(int(word) for word in self._words[row] if word)
        return [(word >> self._bits, word & ((1 << self._bits) - 1)) for word in words]


@functools.cache
def own_stamps() -> tuple[Path, Stamps] | None:
    """Returns the stamps of this process and their file, which are kept until the process ends; `None` if no kernels
    were built for this platform. Starts JAX's backend.

    Raises:
        ImportError: if GPUs cannot write to them.
    """
    gpu = platform() == "gpu"
    if not native.has("gtp_stamp", "CUDA" if gpu else "cpu"):
        return None
    devices, kept, _ = native.record_sizes()
    for left in _FOLDER.glob("gtp-recorder-*"):  # by processes that were killed
        if not Path("/proc", left.name.split("-")[2]).exists():
            _remove(left)
    handle, name = tempfile.mkstemp(prefix=f"gtp-recorder-{os.getpid()}-", dir=_FOLDER if _FOLDER.is_dir() else None)
    os.ftruncate(handle, devices * kept * 8)
    os.close(handle)
    atexit.register(_remove, Path(name))
    stamps = Stamps(Path(name))
    try:
        native.record_to(stamps.memory, jax.local_devices()[0].local_hardware_id if gpu else -1)
    except ImportError as error:  # with stamps in some processes only, their programs would differ
        raise ImportError(
            f"{error} Run without `gtp_jax.recorder`: `gtp-jax train --no-recorder`, `gtp_jax.Trainer(recorder=False)`."
        ) from error
    return Path(name), stamps


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
