"""Batches that are divided among replicas."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh

Tree = Any


@dataclasses.dataclass(frozen=True)
class Batches:
    """A batch, divided among replicas.

    Attributes:
        parts: for each replica, a pytree of arrays on its mesh; `None` if this process has none of its devices.
    """

    parts: tuple[Tree, ...]


def is_here(mesh: Mesh) -> bool:
    """Returns whether this process has devices of a mesh."""
    return any(device.process_index == jax.process_index() for device in mesh.devices.flat)
