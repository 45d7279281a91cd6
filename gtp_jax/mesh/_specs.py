"""Partition specs: the mesh axes that they use, and the specs of stacks."""

from __future__ import annotations

from jax.sharding import PartitionSpec


def stacked_spec(spec: PartitionSpec, ndim: int) -> PartitionSpec:
    """Returns `spec` for an array with leading dimensions (a stack of layers), which are never sharded."""
    return PartitionSpec(*(None,) * (ndim - len(spec)), *spec)


def axes_of(spec: PartitionSpec) -> frozenset[str]:
    """Returns the mesh axes that a partition spec uses."""
    return frozenset(a for e in spec if e is not None for a in ((e,) if isinstance(e, str) else e))
