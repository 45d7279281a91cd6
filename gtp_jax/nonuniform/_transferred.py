"""Counts what a step over replicas of unequal degree transfers, from shapes alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..mesh import DP, axes_of
from ._boxes import box_of, elements
from ._layouts import LeafSpecs, without_replicas
from ._moves import Moves


@dataclasses.dataclass(frozen=True)
class Transferred:
    """The bytes that the busiest device transfers in a step, one after another and not overlapped with compute.

    Attributes:
        gather: the bytes of weights that are gathered over the replicas that divide them in storage.
        unfold: the bytes of weights that move from the core to a replica's layout.
        fold: the bytes of gradients that move back to the core's layout.
        reduction: the bytes of gradients that are summed over replicas.
        copies: the bytes that the device reads and writes in its own memory to fill buffers and to take them apart.
    """

    gather: int
    unfold: int
    fold: int
    reduction: int
    copies: int

    @property
    def over_links(self) -> int:
        """The bytes of everything except the copies."""
        return self.gather + self.unfold + self.fold + self.reduction


def transferred(
    weights: Sequence[LeafSpecs],
    gradients: Sequence[LeafSpecs],
    unfold: Sequence[Moves],
    fold: Sequence[Moves],
    sizes: Mapping[Any, int],
) -> Transferred:
    """Counts the bytes of a step.

    Args:
        weights: the shapes and partitions of the parameters, with the dtypes in which they travel.
        gradients: the shapes and partitions of the gradients, with the dtypes in which they travel.
        unfold: the moves that bring each replica its weights.
        fold: the moves that bring each replica's gradients to the core.
        sizes: the sizes of the core's mesh axes.
    """
    copies = [moves.bytes_copied for moves in (max(unfold, key=_copied), max(fold, key=_copied))]
    return Transferred(
        gather=sum(_gathered(leaf, sizes) for leaf in weights),
        unfold=max(moves.bytes_in_turn for moves in unfold),
        fold=max(moves.bytes_in_turn for moves in fold),
        reduction=sum(_reduced(leaf, sizes) for leaf in gradients),
        copies=sum(copies),
    )


def _copied(moves: Moves) -> int:
    return moves.bytes_copied


def _gathered(leaf: LeafSpecs, sizes: Mapping[Any, int]) -> int:
    """Returns the bytes that a device receives when a weight is gathered over replicas; 0 if replicas do not divide
    it."""
    return (sizes[DP] - 1) * _stored(leaf, sizes) if DP in axes_of(leaf.core) else 0


def _reduced(leaf: LeafSpecs, sizes: Mapping[Any, int]) -> int:
    """Returns the bytes that a device sends to sum a gradient: in a reduce-scatter or an all-reduce over replicas, and
    in another all-reduce over the ranks that store the same part, which gives them the same bits."""
    own, replicas = _stored(leaf, sizes), sizes[DP]
    sent = (replicas - 1) * own if DP in axes_of(leaf.core) else 2 * (replicas - 1) * own // replicas
    alike = int(np.prod([size for axis, size in sizes.items() if axis != DP and axis not in axes_of(leaf.core)]))
    return sent + 2 * (alike - 1) * own // alike


def _stored(leaf: LeafSpecs, sizes: Mapping[Any, int]) -> int:
    spec = leaf.core if DP in axes_of(leaf.core) else without_replicas(leaf.core)
    return elements(box_of(leaf.core_shape, spec, sizes, dict.fromkeys(sizes, 0))) * leaf.dtype.itemsize
