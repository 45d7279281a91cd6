"""Sends the core's metrics to processes that have none of its devices."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ._batches import is_here
from ._meshes import ReplicaMeshes
from ._moves import LeafBoxes, plan_moves
from ._transfer import Transfer


class CoreMetrics:
    """Sends scalars from each replica's core devices to its other devices, if a process has no core device.

    All processes of a replica must call it together.

    Args:
        replicas: the replicas and their meshes.
    """

    def __init__(self, replicas: ReplicaMeshes) -> None:
        self._replicas = replicas
        self._core = {device.process_index for device in replicas.core.devices.flat}
        everyone = {device.process_index for mesh in replicas.meshes for device in mesh.devices.flat}
        self._needed = not everyone <= self._core
        self._transfers: dict[tuple[int, tuple[np.dtype, ...]], Transfer] = {}

    def __call__(self, metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns the metrics as arrays that this process has a copy of.

        Args:
            metrics: scalars that are replicated on all devices of the core.
        """
        if not self._needed:
            return metrics
        found = metrics
        for place, mesh in enumerate(self._replicas.meshes):
            if is_here(mesh):
                kinds = tuple(np.dtype(x.dtype) for x in metrics.values())
                parts = [{s.device: s.data for s in x.addressable_shards} for x in metrics.values()]
                told = self._transfer(place, kinds)(parts)
                if jax.process_index() not in self._core:
                    found = {name: next(iter(part.values())) for name, part in zip(metrics, told, strict=True)}
        return found

    def _transfer(self, place: int, kinds: tuple[np.dtype, ...]) -> Transfer:
        if (place, kinds) not in self._transfers:
            replica = self._replicas.plan.replicas[place]
            slots = [slot for row in replica.slots for slot in row]
            core = {slot for row in replica.core for slot in row}
            before: Any = {number: () for number, slot in enumerate(slots) if slot in core}
            after: Any = {number: () for number in range(len(slots))}
            moves = plan_moves([LeafBoxes(kind, before, after) for kind in kinds])
            devices = list(self._replicas.meshes[place].devices.flat)
            self._transfers[place, kinds] = Transfer(moves, devices, "tell")
        return self._transfers[place, kinds]
