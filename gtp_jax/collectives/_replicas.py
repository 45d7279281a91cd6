"""Sums gradients over the mesh axes that do not shard a parameter. Called inside a `shard_map`."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from ..mesh import axes_of, degree


def replica_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """Returns the axes of the mesh in scope that have more than one rank, and are not in a partition spec."""
    names = jax.sharding.get_abstract_mesh().axis_names
    return tuple(a for a in names if a not in axes_of(spec) and degree(a) > 1)


def sum_over_replicas(gradients: Any, specs: Any) -> Any:
    """Sums each leaf over every axis of the mesh in scope that is not in its partition spec.

    Leaves that are summed over the same axes are summed together; XLA may combine small ones into one all-reduce.

    Args:
        gradients: a pytree of arrays.
        specs: a pytree of the same structure, with `PartitionSpec` leaves.
    """
    leaves, tree = jax.tree.flatten(gradients)
    partitions = jax.tree.leaves(specs)
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for i, spec in enumerate(partitions):
        groups[replica_axes(spec)].append(i)
    for axes, members in groups.items():
        if axes:
            for i, total in zip(members, lax.psum([leaves[i] for i in members], axes), strict=True):
                leaves[i] = total
    return jax.tree.unflatten(tree, leaves)
