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


def join_stored(groups: Groups, stored: Mapping[Path, Shards]) -> Joined:
    """Gathers over the optimizer's axes what ranks store of shards, in the dtype in which the shards travel.

    Of weights that travel in a format `quantize` gathers the codes. Weights that ranks store as whole shards are left
    out.

    Args:
        groups: as `resolve` returns them.
        stored: by path of the module.
    """
    found: Joined = {}
    coded = {path for (path, _), group in groups.items() if group.wire is not None}
    for (path, layers), group in groups.items():
        if group.wire is not None or not group.divided or (path not in coded and path in found):
            continue
        mine = stored[path]
        if path in coded:  # only the layers at its ends are in high precision
            mine = tuple(x[layers.start : layers.stop] for x in mine)
        shards = gather_stored([lax.stop_gradient(x) for x in mine], group.layouts, group.dtype)
        found.setdefault(path, {})[layers.start] = shards
    return found


def of_shards(groups: Groups) -> Groups:
    """Returns the same groups of weights stored as shards: their gradients are not summed over the optimizer's
    axes."""
    return {key: _of_shards(group) for key, group in groups.items()}


def _of_shards(group: WeightGroup) -> WeightGroup:
    return dataclasses.replace(group, layouts=tuple(layout.of_shards for layout in group.layouts))
