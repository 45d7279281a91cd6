"""Exchanges small host values among the processes of a run."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def of_all_processes(value: Any) -> np.ndarray:
    """Returns the values of all processes, stacked in order of process. Acts as a barrier: every process must call it.

    `jax.experimental.multihost_utils` requires the same number of devices in every process. This function does not,
    because it uses only the first device of each process.

    Args:
        value: an array of the same shape and dtype in all processes. Without x64, 64-bit values become 32-bit.
    """
    own = np.asarray(value)[None]
    if jax.process_count() == 1:
        return own
    firsts = [devices[0] for devices in _by_process()]
    mesh = Mesh(np.array(firsts), ("process",))
    shape = (len(firsts), *own.shape[1:])
    part = jax.device_put(own, firsts[jax.process_index()])
    stacked = jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, PartitionSpec("process")), [part])
    with jax.set_mesh(mesh):
        whole = jax.jit(_same, out_shardings=NamedSharding(mesh, PartitionSpec()))(stacked)
    return np.asarray(whole.addressable_data(0))


def have_equally_many_devices() -> bool:
    """Returns whether all processes have the same number of devices."""
    return len({len(devices) for devices in _by_process()}) == 1


def _by_process() -> list[list[Any]]:
    devices: list[list[Any]] = [[] for _ in range(jax.process_count())]
    for device in jax.devices():
        devices[device.process_index].append(device)
    return devices


def _same(x: jax.Array) -> jax.Array:
    return x
