"""Sends the codes of frozen weights in tiles that shards may cut. Called inside a `shard_map`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import jax

from ..formats import QuantizedArray, Tiled
from ._codes import codes_specs
from ._tiles import tiles_of
from ._wire import FusedWeights, Wire
from ._wire_spec import ModulePath, WireSpec


@functools.partial(jax.tree_util.register_dataclass, data_fields=("kernels",), meta_fields=("members", "format"))
@dataclasses.dataclass(frozen=True)
class StoredTiles(Wire):
    """The codes that this rank stores of one frozen weight, with the scales of the whole, which are not sent.

    Attributes:
        kernels: the codes of the kernels, as `kernels_in_tiles` returns them.
        members: the name of the fused weight.
        format: the format of the codes.
    """

    kernels: tuple[QuantizedArray, ...]
    members: tuple[ModulePath, ...]
    format: Tiled

    def gather(self, groups: Mapping[ModulePath, WireSpec]) -> FusedWeights:
        """Returns the codes or the values of the fused weight, as `Tiles.gather` does."""
        (name,) = self.members
        return tiles_of(self.kernels, groups[name], name).gather(groups)

    def specs(self, groups: Mapping[ModulePath, WireSpec], *, stacked: bool = False) -> StoredTiles:
        """Returns the partitions of each kernel's codes."""
        layouts = groups[self.members[0]].layouts
        kernels = tuple(codes_specs(one, self.format.format, int(stacked)) for one in layouts)
        return dataclasses.replace(self, kernels=kernels)
