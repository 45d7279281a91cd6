"""Shards, joined from what ranks store of them (ZeRO), once for many calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jax import lax

from ..collectives import Shards, gather_stored
from ._group import WeightGroup
from ._resolve import Groups, Path

# Shards of kernels that travel in no format, by path of the module and first layer. Of a stack with the leading
# dimension of some layers.
Joined = dict[Path, dict[int, Shards]]


# Layers of a stack that are joined first, as many as have been gathered when the first has been computed; and how many
# at a time then, few enough to arrive while two layers compute.
_FIRST, _NEXT = 2, 6


def join_stored(
    groups: Groups,
    stored: Mapping[Path, Shards],
    written_out: Collection[Path] = (),
    gather: Callable[..., Shards] = gather_stored,
    rounded: Collection[Path] = (),
) -> Joined:
    """Gathers over the optimizer's axes what ranks store of shards, in the dtype in which the shards travel.

    Of weights that travel in a format `quantize` gathers the codes. Weights that ranks store as whole shards are left
    out. In a model without codes the layers of stacks that are written out come a few at a time, one gather after the
    other, behind all other weights: so the first layers are computed while the others arrive.

    Args:
        groups: as `resolve` returns them.
        stored: by path of the module.
        written_out: stacks without loops, by path of their layers.
        gather: `gather_stored`, or what does the same with global arrays.
        rounded: modules whose arrays have the dtype in which they travel, but for a conversion: taken as they are,
            although no axes divide them further.
    """
    found: Joined = {}
    later: dict[int, dict[Path, Shards]] = {}
    coded = {path for (path, _), group in groups.items() if group.wire is not None}
    kinds = {
        path: group for (path, _), group in groups.items() if group.wire is None and (group.divided or path in rounded)
    }
    for (path, layers), group in groups.items():
        if path not in kinds or group.wire is not None or (path not in coded and path in found):
            continue
        mine = tuple(lax.stop_gradient(x) for x in stored[path])
        start, stop = 0, None
        if path in coded:  # only the layers at its ends are in high precision
            start, stop = layers.start, layers.stop
        elif not coded and layers.stack in written_out:
            stop = _FIRST
            for next_start in range(_FIRST, len(mine[0]), _NEXT):
                later.setdefault(next_start, {})[path] = tuple(x[next_start : next_start + _NEXT] for x in mine)
        mine = mine if layers.stack is None else tuple(x[start:stop] for x in mine)
        found.setdefault(path, {})[start] = gather(mine, group.layouts, group.dtype)
    before: Any = found
    for start, some in sorted(later.items()):
        some, _ = lax.optimization_barrier((some, before))  # else XLA would join all in one launch
        before = {path: gather(mine, kinds[path].layouts, kinds[path].dtype) for path, mine in some.items()}
        for path, shards in before.items():
            found[path][start] = shards
    return found


def of_shards(groups: Groups) -> Groups:
    """Returns the same groups of weights stored as shards: their gradients are not summed over the optimizer's
    axes."""
    return {key: _of_shards(group) for key, group in groups.items()}


def _of_shards(group: WeightGroup) -> WeightGroup:
    return dataclasses.replace(group, layouts=tuple(layout.of_shards for layout in group.layouts))
