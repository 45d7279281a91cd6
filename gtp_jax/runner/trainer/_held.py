"""Checks that each device can hold its part of a run's state."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ...hlo import bytes_per_device, quantity
from ...mesh import device_memory
from ...train import TrainState


@dataclasses.dataclass(frozen=True)
class Held:
    """The memory of a run's state on one device: weights, optimizer, and frozen weights.

    Attributes:
        bytes: what a device holds.
        even_bytes: what it would hold if all devices of the mesh held equal parts of the logical arrays.
        mesh: the mesh, in words.
    """

    bytes: int
    even_bytes: float
    mesh: str

    def __str__(self) -> str:
        own = f"{quantity(self.bytes, 'B')} of weights and optimizer on each device"
        return f"{own}; an even share is {quantity(self.even_bytes, 'B')}"


def held_of(state: TrainState, mesh: Mesh) -> Held:
    """Returns what a device of a mesh holds of a state, which may be abstract."""

    def arrays(one: TrainState) -> tuple[Any, ...]:
        return one.params, one.opt_state, one.frozen

    logical = jax.tree.leaves(arrays(jax.eval_shape(lambda one: one.logical(), state)))
    whole = sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in logical)
    words = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "one device"
    return Held(bytes_per_device(arrays(state)), whole / mesh.size, words)


def check_held_fits(held: Held) -> None:
    """Checks that the devices' memory can hold their parts of a state. All processes must call it.

    Raises:
        ValueError: if it cannot; the message has the numbers. Devices that do not report their memory are not checked.
    """
    memory = device_memory()
    if memory is not None and held.bytes > memory.limit:
        raise ValueError(
            f"each device of {held.mesh} would hold {quantity(held.bytes, 'B')} of weights and optimizer "
            f"(an even share is {quantity(held.even_bytes, 'B')}), but has {quantity(memory.limit, 'B')} of memory for "
            "arrays. Use more devices, or a higher --gtp; if devices have failed, repair them and resume. "
            "`gtp-jax inspect` shows which weights stay whole."
        )
