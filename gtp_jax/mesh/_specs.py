"""Partition specs: the mesh axes that they use, by dimension or together, and the specs of stacks."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import PartitionSpec


def stacked_spec(spec: PartitionSpec, ndim: int) -> PartitionSpec:
    """Returns `spec` for an array with leading dimensions (a stack of layers), which are never sharded."""
    return PartitionSpec(*(None,) * (ndim - len(spec)), *spec)


def axes_of(spec: PartitionSpec) -> frozenset[str]:
    """Returns the mesh axes that a partition spec uses."""
    return frozenset(axis for axes in axes_by_dim(spec) for axis in axes)


def axes_in_order(spec: PartitionSpec) -> tuple[str, ...]:
    """Returns the mesh axes that a partition spec uses, in its order. Pass these to collectives: the order of `axes_of`
    differs between processes, which must run the same program."""
    return tuple(axis for axes in axes_by_dim(spec) for axis in axes)


def axes_by_dim(spec: PartitionSpec, ndim: int = 0) -> list[tuple[str, ...]]:
    """Returns the mesh axes that divide each dimension, outermost first, for at least `ndim` dimensions."""
    axes = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec]
    return axes + [()] * (ndim - len(axes))


def spec_by_dim(axes: Sequence[Sequence[str]]) -> PartitionSpec:
    """Returns the partition spec of an array whose dimensions these axes divide; see `axes_by_dim`."""
    return PartitionSpec(*(None if not own else own[0] if len(own) == 1 else tuple(own) for own in axes))
