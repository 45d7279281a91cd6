"""Defines what a step over replicas knows of them; `Replicas`, which makes the step, provides it."""

from __future__ import annotations

from typing import Any, Protocol

from jax.sharding import Mesh

from ..mesh import Path
from ..nn import ModelDef
from ._batches import Batches
from ._faults import FaultPlan


class ReplicaMeshes(Protocol):
    """A plan, its meshes and the model on each of them: `Replicas` says more of each."""

    plan: FaultPlan
    core: Mesh
    meshes: tuple[Mesh, ...]
    model_defs: tuple[ModelDef, ...]
    shapes: dict[Path, tuple[int, ...]]

    def place(self, batch: Any) -> Batches:
        """Places the rows of a batch on the devices that train on them."""
        ...
