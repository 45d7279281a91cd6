"""Decides which rank works on which matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Load(NamedTuple):
    """Matrices to be shared among ranks.

    Attributes:
        matrices: the number of matrices.
        cost: the work of one matrix, in any unit.
        axes: the mesh axes whose ranks share them. Along the other axes of the mesh, ranks share other matrices in the
            same way.
    """

    matrices: int
    cost: float
    axes: tuple[str, ...]


def owners_of_rest(loads: Sequence[Load], sizes: Mapping[str, int]) -> list[list[int]]:
    """Returns the owners of the matrices that are left after each rank has got equally many of each load.

    The matrices that cost the most are placed first, each on the rank that has the least to do. If all loads have the
    same axes, the rank with the most to do thus has at most the mean and the cost of one matrix.

    Args:
        loads: the matrices.
        sizes: the sizes of all mesh axes.

    Returns:
        For each load, the owner of each matrix that is left: a position in the product of its axes, outermost first.
    """
    names = list(sizes)
    busy = np.zeros(tuple(sizes.values()))
    owners: list[list[int]] = [[] for _ in loads]
    for number in sorted(range(len(loads)), key=lambda i: -loads[i].cost):
        load = loads[number]
        shared = [names.index(axis) for axis in load.axes]
        others = [dim for dim in range(len(names)) if dim not in shared]
        ranks = int(np.prod([busy.shape[dim] for dim in shared], dtype=int))
        for _ in range(load.matrices % ranks):
            rows = busy.transpose(shared + others).reshape(ranks, -1).copy()
            owner = int(np.argmin(rows.max(axis=1)))
            rows[owner] += load.cost
            moved = rows.reshape([busy.shape[dim] for dim in shared + others])
            busy = moved.transpose(np.argsort(shared + others))
            owners[number].append(owner)
    return owners
