"""The meshes of a run: a single one or, after failures, one per replica, of unequal degrees."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from ...mesh import Roles, default_roles, make_mesh
from ...nonuniform import Batches, FaultPlan, Replicas, is_here, with_best_core
from ..data import Loader, Rows, ahead
from ._train_flags import TrainConfig, padded_seq


@dataclasses.dataclass(frozen=True)
class Meshes:
    """The meshes on which a run computes.

    Attributes:
        mesh: the mesh of the state.
        replicas: the replicas after failures, whose degrees may be unequal; `None` if the mesh is the only one.
    """

    mesh: Mesh
    replicas: Replicas | None = None

    @property
    def roles(self) -> Roles:
        """The roles of the mesh's axes."""
        return default_roles(self.mesh.axis_names)

    @property
    def plan(self) -> FaultPlan | None:
        """The plan for continuing after failures; `None` without failures."""
        return None if self.replicas is None else self.replicas.plan

    @property
    def size(self) -> int:
        """The number of devices that compute."""
        return self.mesh.size if self.plan is None else len(self.plan.active)

    def loader(self, windows: Rows, batch: int, microbatches: int) -> Loader | ReplicaLoader:
        """Returns the batches to train on."""
        if self.replicas is None or self.replicas.plan.uniform:
            return self._loader(windows, batch, self._fill(batch, microbatches))
        return ReplicaLoader(self.replicas, windows, batch)

    def held_out_loader(self, windows: Rows, batch: int) -> Loader:
        """Returns the batches to evaluate on."""
        return self._loader(windows, batch, self._fill(batch, 1))

    def _loader(self, windows: Rows, batch: int, fill: int) -> Loader:
        pad = padded_seq(windows.seq, self.mesh.shape) - windows.seq
        return Loader(windows, batch, self.mesh, self.roles, fill, pad)

    def _fill(self, batch: int, microbatches: int) -> int:
        """Returns how many rows of weight 0 to add so that the ranks divide a batch: after failures they may not."""
        return -batch % (math.prod(self.mesh.shape[axis] for axis in self.roles.batch) * microbatches)


class ReplicaLoader:
    """Builds the batches of a run, with each replica's rows on its own devices.

    Args:
        replicas: the replicas and their plan.
        windows: the source of the rows.
        batch: the number of sequences per batch, over all replicas.
    """

    def __init__(self, replicas: Replicas, windows: Rows, batch: int) -> None:
        self._loaders = [
            Loader(windows, replica.batch, mesh, rows=(replica.rows[0], batch)) if is_here(mesh) else None
            for replica, mesh in zip(replicas.plan.replicas, replicas.meshes, strict=True)
        ]

    def at(self, step: int) -> Batches:
        """Returns the batch of a step."""
        return Batches(tuple(None if loader is None else loader.at(step) for loader in self._loaders))

    def steps(self, start: int, stop: int) -> Iterator[Batches]:
        """Yields the batches of steps `start` to `stop` (exclusive), each built while the previous one is in use."""
        return ahead(self.at, start, stop)


def make_meshes(config: TrainConfig, degrees: dict[str, int], factory: Callable[[nnx.Rngs], Any]) -> Meshes:
    """Returns the meshes of a run on the available devices.

    Raises:
        ValueError: if the run cannot continue after the failures that are given.
    """
    if not config.faults.any:
        return Meshes(make_mesh(**degrees))
    plan = config.fault_plan(degrees)
    plan = plan if config.faults.core_tp is not None else with_best_core(factory, plan)
    replicas = Replicas(factory, plan)
    return Meshes(replicas.core, replicas)


def without_sequence_parallelism(config: TrainConfig, degrees: dict[str, int]) -> bool:
    """Returns whether all replicas continue at the same tensor-parallel degree, and it does not divide sequences.

    Replicas of unequal degree decide this for themselves.
    """
    plan = config.fault_plan(degrees) if config.faults.any else None
    return plan is not None and plan.uniform and config.seq % plan.core_tp > 0
