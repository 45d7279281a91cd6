"""Checks that each device can hold its part of a run's state."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ...hlo import bytes_on_host, bytes_per_device, quantity
from ...mesh import device_memory
from ...train import TrainState


@dataclasses.dataclass(frozen=True)
class Held:
    """The memory of a run's state on one device and its host: weights, optimizer, and frozen weights.

    Attributes:
        bytes: what a device holds between steps.
        even_bytes: what device and host would hold if all devices of the mesh held equal parts of the logical arrays.
        mesh: the mesh, in words.
        host_bytes: what the host holds for a device; `None` if the run keeps nothing there.
        copied_bytes: the weights among these, which a step copies to the device.
    """

    bytes: int
    even_bytes: float
    mesh: str
    host_bytes: int | None = None
    copied_bytes: int = 0

    def __str__(self) -> str:
        own = f"{quantity(self.bytes, 'B')} of weights and optimizer on each device"
        if self.host_bytes is not None:  # 0 says that all arrays are too small to be there
            own += f", {quantity(self.host_bytes, 'B')} in the memory of its host"
        return f"{own}; an even share is {quantity(self.even_bytes, 'B')}"


def held_of(state: TrainState, mesh: Mesh, *, offloads: bool = False) -> Held:
    """Returns what a device of a mesh and its host hold of a state.

    Args:
        state: the state, which may be abstract.
        mesh: the mesh.
        offloads: whether the host keeps a part of it.
    """

    def arrays(one: TrainState) -> tuple[Any, ...]:
        return one.params, one.opt_state, one.frozen

    logical = jax.tree.leaves(arrays(jax.eval_shape(lambda one: one.logical(), state)))
    whole = sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in logical)
    words = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "one device"
    host, copied = bytes_on_host(arrays(state)), bytes_on_host(state.params)
    device = bytes_per_device(arrays(state)) - host
    return Held(device, whole / mesh.size, words, host if offloads else None, copied)


def check_held_fits(held: Held) -> None:
    """Checks that the devices' memory can hold their parts of a state. All processes must call it.

    Raises:
        ValueError: if it cannot; the message has the numbers. Devices that do not report their memory are not checked.
    """
    memory, needed = device_memory(), held.bytes + held.copied_bytes
    if memory is not None and needed > memory.limit:
        even = f"an even share is {quantity(held.even_bytes, 'B')}"
        if held.host_bytes is not None:
            even += f", of which the host keeps {quantity(held.host_bytes - held.copied_bytes, 'B')} during a step"
        raise ValueError(
            f"each device of {held.mesh} would hold {quantity(needed, 'B')} of weights and optimizer ({even}), but has "
            f"{quantity(memory.limit, 'B')} of memory for arrays. Use more devices, a higher --gtp, or --offload; if "
            "devices have failed, repair them and resume. `gtp-jax inspect` shows which weights stay whole."
        )
