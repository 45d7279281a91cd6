"""What a rank sends of a layer's weights: the protocol, and arrays in the dtype in which they are multiplied.

[Note: a wire of your own]
A wire is a subclass of `Wire`. An `OwnFormat`, the `wire` of a recipe, makes it once per
step, and every pass gathers it. Nothing else in the library asks what it is: chains read its arrays layer by layer, tie
them, keep what `ready` returns for backward, and differentiate straight through `gather`.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax

from ..formats import QuantizedArray, WireFormat
from ._fused import Shards, gather_part, part_of
from ._group import ModulePath, WeightGroup
from ._optimizer_axes import stored_specs
from ._ranks import ranks_spec

# Fused weights by name, or their codes where those are multiplied.
FusedWeights = dict[ModulePath, jax.Array | QuantizedArray]


class Wire(abc.ABC):
    """What a rank sends of the fused weights that travel together: a dataclass, and a pytree.

    `members` is a field, and `gather` goes by it: a chain renames members with `dataclasses.replace`.
    For the layers of a stack its arrays have a leading dimension. Those of one layer have at least one dimension, other
    than an amax of frozen codes.
    Methods are of one layer and are called inside a `shard_map`, except `specs`.

    Attributes:
        members: the names of the fused weights, in order.
        format: the format of its codes, equal to `WeightGroup.wire` of its members, by which it is found; `None` of
            arrays in the dtype in which they are multiplied.
    """

    members: tuple[ModulePath, ...]
    format: Any

    @abc.abstractmethod
    def gather(self, groups: Mapping[ModulePath, WeightGroup]) -> FusedWeights:
        """Returns the fused weights of its members, made of what all ranks send."""

    def ready(self, groups: Mapping[ModulePath, WeightGroup]) -> Wire | None:
        """Returns what is sent in its place, made without communication: a chain keeps it for backward. `None`: it is
        sent as it is."""
        del groups

    def specs(self, groups: Mapping[ModulePath, WeightGroup], *, stacked: bool = False) -> Any:
        """Returns the partitions of its arrays in global view, a pytree prefix; by default they are every rank's own.

        Args:
            groups: of its members.
            stacked: whether it has the leading dimension.
        """
        del groups
        return ranks_spec(stacked=stacked)


@runtime_checkable
class OwnFormat(WireFormat, Protocol):
    """Describes a format of your own: the `wire` of a recipe, hashable and compared by value.

    Weights in it are multiplied as their values. They can be neither frozen nor gathered before a step.
    """

    def make(self, shards: Mapping[ModulePath, Shards], groups: Mapping[ModulePath, WeightGroup]) -> Wire:
        """Returns what this rank sends of weights that travel together: those of one layer of a stack that have the
        same format, dtype and axes; outside of stacks one module's. Called inside a `shard_map`, once per step; under
        `use_recipe`, once per call. Nothing differentiates it.

        Args:
            shards: by name of the fused weight one array per kernel, with the leading dimension of a stack or without:
                its shard; or what this rank stores of it, where `group.divided`. `part_of(kernels, layouts, dtype)`
                joins either, and moves it over dp in that dtype: round first, and join the codes as uint8.
            groups: what is decided about the weights, by the same names.
        """
        ...

    def wire_bytes(self, group: WeightGroup) -> int:
        """Returns the bytes of one layer's gathered weight on the wire, of all ranks' shards."""
        ...


@functools.partial(jax.tree_util.register_dataclass, data_fields=("shards",), meta_fields=("members", "joined"))
@dataclasses.dataclass(frozen=True)
class Kernels(Wire):
    """This rank's shards of one fused weight's kernels, which are cast, joined and gathered in every pass.

    Attributes:
        shards: one array per kernel: its shard, or what this rank stores of it, which a gather first joins to that.
        members: the name of the fused weight.
        joined: whether they have been joined to shards from what ranks store.
    """

    shards: Shards
    members: tuple[ModulePath, ...] = ((),)
    joined: bool = False
    format = None

    def ready(self, groups: Mapping[ModulePath, WeightGroup]) -> Part | None:
        """Returns this rank's part of the fused weight. `None` where there is nothing to cast, or communication is part
        of it."""
        group = groups[self.members[0]]
        if group.divided or not group.travels or all(shard.dtype == group.dtype for shard in self.shards):
            return None
        return Part(part_of(self.shards, group.layouts, group.dtype), self.members)

    def gather(self, groups: Mapping[ModulePath, WeightGroup]) -> FusedWeights:
        """Returns the fused weight; an array of any shape as such."""
        group = groups[self.members[0]]
        return Part(part_of(self.shards, group.layouts, group.dtype), self.members).gather(groups)

    def specs(self, groups: Mapping[ModulePath, WeightGroup], *, stacked: bool = False) -> Kernels:
        """Returns the partitions of its shards."""
        del stacked  # their numbers of dimensions tell
        layouts = groups[self.members[0]].layouts
        layouts = [layout.of_shards for layout in layouts] if self.joined else layouts
        return dataclasses.replace(self, shards=stored_specs(layouts, self.shards))  # pyright: ignore[reportArgumentType]


@functools.partial(jax.tree_util.register_dataclass, data_fields=("array",), meta_fields=("members",))
@dataclasses.dataclass(frozen=True)
class Part(Wire):
    """This rank's part of one fused weight, as it travels.

    Attributes:
        array: `(*experts, rows of kernel 0 | rows of kernel 1 | ..., cols)`.
        members: the name of the fused weight.
    """

    array: jax.Array
    members: tuple[ModulePath, ...]
    format = None

    def gather(self, groups: Mapping[ModulePath, WeightGroup]) -> FusedWeights:
        """Returns the fused weight; an array of any shape as such."""
        group = groups[self.members[0]]
        weight = gather_part(self.array, group.layouts)
        return {self.members[0]: weight if group.array is None else group.array.from_fused(weight)}
