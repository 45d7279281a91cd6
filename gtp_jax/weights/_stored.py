"""Shards, joined from what ranks store of them (ZeRO), once for many calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jax import lax

from ..collectives import Shards, gather_stored
from ._group import WeightGroup
from ._resolve import Groups, Path

# Shards of kernels that travel in no format, by path of the module and first layer. Of a stack with the leading
# dimension of some layers.
Joined = dict[Path, dict[int, Shards]]


# Layers of a stack that are joined ahead of the rest: as many as have been gathered when the first has been computed.
_AHEAD = 2


def join_stored(groups: Groups, stored: Mapping[Path, Shards]) -> Joined:
    """Gathers over the optimizer's axes what ranks store of shards, in the dtype in which the shards travel.

    Of weights that travel in a format `quantize` gathers the codes. Weights that ranks store as whole shards are left
    out. In a model without codes the first two layers of each stack, and what is in no stack, come first: the rest may
    arrive while the first layer computes.

    Args:
        groups: as `resolve` returns them.
        stored: by path of the module.
    """
    found: Joined = {}
    rest: dict[Path, Shards] = {}
    coded = {path for (path, _), group in groups.items() if group.wire is not None}
    kinds = {path: group for (path, _), group in groups.items() if group.wire is None and group.divided}
    for (path, layers), group in groups.items():
        if path not in kinds or group.wire is not None or (path not in coded and path in found):
            continue
        mine = tuple(lax.stop_gradient(x) for x in stored[path])
        start = 0
        if path in coded:  # only the layers at its ends are in high precision
            start = layers.start
            mine = tuple(x[start : layers.stop] for x in mine)
        elif not coded and layers.stack is not None and len(mine[0]) > _AHEAD:
            rest[path] = tuple(x[_AHEAD:] for x in mine)
            mine = tuple(x[:_AHEAD] for x in mine)
        found.setdefault(path, {})[start] = gather_stored(mine, group.layouts, group.dtype)
    if rest:
        rest, _ = lax.optimization_barrier((rest, found))  # else XLA would join both in one launch
    for path, mine in rest.items():
        found[path][_AHEAD] = gather_stored(mine, kinds[path].layouts, kinds[path].dtype)
    return found


def of_shards(groups: Groups) -> Groups:
    """Returns the same groups of weights stored as shards: their gradients are not summed over the optimizer's
    axes."""
    return {key: _of_shards(group) for key, group in groups.items()}


def _of_shards(group: WeightGroup) -> WeightGroup:
    return dataclasses.replace(group, layouts=tuple(layout.of_shards for layout in group.layouts))
