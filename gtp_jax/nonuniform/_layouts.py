"""Plans what moves between the core and a replica, from the partitions in which each stores a model's parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jax.sharding import PartitionSpec

from ..mesh import DP, GTP, TP, axes_by_dim, spec_by_dim
from ._boxes import Box, box_of
from ._faults import Replica
from ._moves import LeafBoxes, Moves, plan_moves


@dataclasses.dataclass(frozen=True)
class LeafSpecs:
    """An array, and how it is stored on the core and in a replica.

    Attributes:
        shape: the logical shape of the array.
        dtype: the dtype of the array.
        core: the array's partition on the core.
        replica: the array's partition in the replica.
        core_shape: the shape of the array that the core stores, which may be padded (`even_shares`).
        replica_shape: the shape of the array that the replica stores, which may be padded differently.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    core: PartitionSpec
    replica: PartitionSpec
    core_shape: tuple[int, ...]
    replica_shape: tuple[int, ...]


def plan_unfold(replica: Replica, leaves: Sequence[LeafSpecs]) -> Moves:
    """Plans how a replica's devices get arrays from those of them that belong to the core.

    Devices are numbered along the rows of the replica's grid. Arrays that replicas divide on the core must already have
    been gathered over the replicas. Padding does not move.
    """
    pairs = [(leaf, _on_core(replica, leaf), _on_replica(replica, leaf)) for leaf in leaves]
    return plan_moves([LeafBoxes(leaf.dtype, core, own, leaf.shape) for leaf, core, own in pairs])


def plan_fold(replica: Replica, leaves: Sequence[LeafSpecs]) -> Moves:
    """Plans the way back: gradients that are summed within the replica go from all its devices to the core."""
    pairs = [(leaf, _on_replica(replica, leaf), _on_core(replica, leaf)) for leaf in leaves]
    return plan_moves([LeafBoxes(leaf.dtype, own, core, leaf.shape) for leaf, own, core in pairs])


def without_replicas(spec: PartitionSpec) -> PartitionSpec:
    """Returns a partition without the replicas' axis (dp), which divides only stored masters and optimizer state."""
    return spec_by_dim([[axis for axis in axes if axis != DP] for axes in axes_by_dim(spec)])


def _on_core(replica: Replica, leaf: LeafSpecs) -> Mapping[int, Box]:
    ranks = [replica.slots[0].index(slot) for slot in replica.core[0]]
    return _boxes(leaf.core_shape, without_replicas(leaf.core), replica, ranks)


def _on_replica(replica: Replica, leaf: LeafSpecs) -> Mapping[int, Box]:
    return _boxes(leaf.replica_shape, leaf.replica, replica, range(replica.tp))


def _boxes(shape: tuple[int, ...], spec: PartitionSpec, replica: Replica, ranks: Sequence[int]) -> Mapping[int, Box]:
    """Returns the part that each device stores, if only these ranks of tp store parts."""
    gtp = len(replica.slots)
    sizes = {DP: 1, GTP: gtp, TP: len(ranks)}
    return {
        g * replica.tp + rank: box_of(shape, spec, sizes, {DP: 0, GTP: g, TP: place})
        for g in range(gtp)
        for place, rank in enumerate(ranks)
    }
