"""Chooses how weights are padded so that the ranks divide them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ._storage import UNPADDED, Padding

# The largest padding, as a fraction of the weight, that is added so that shards consist of whole blocks or stay as they
# are. More is added only so that all ranks store equal shares.
LITTLE = 0.03


class Target(NamedTuple):
    """A dimension that may be padded, and the number that its size becomes a multiple of."""

    dim: int
    multiple: int


def choose_padding(
    shapes: Sequence[tuple[int, ...]], preferred: Sequence[Target], others: Sequence[Target]
) -> tuple[int | None, list[Padding]]:
    """Returns the dimension to pad, `None` if no target can be taken, and the padding of each kernel.

    Args:
        shapes: the logical shapes of the kernels.
        preferred: the targets to try first, in order; the first one that adds no more than `LITTLE` is taken.
        others: the targets to choose from otherwise; the one that adds least is taken.
    """
    elements = sum(map(math.prod, shapes))

    def along(target: Target) -> tuple[float, int, list[Padding]]:
        dim, multiple = target
        paddings = [Padding(dim, -shape[dim] % multiple) for shape in shapes]
        added = sum(math.prod(s) // s[dim] * padding.size for s, padding in zip(shapes, paddings, strict=True))
        return added / elements, dim, paddings

    good = [one for one in map(along, preferred) if one[0] <= LITTLE]
    choices = [*good, *sorted(map(along, others), key=lambda one: one[0])]
    return choices[0][1:] if choices else (None, [UNPADDED] * len(shapes))
