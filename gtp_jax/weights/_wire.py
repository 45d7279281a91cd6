"""Defines the protocol for what a rank sends of a layer's weights, and its form for weights that are not quantized.

[Note: a wire of your own]
Subclass `Wire`, and make an `OwnFormat` the `wire` of a recipe. The format makes the wire once per step, and passes
gather the wire. No other part of the library depends on the subclass: chains read its arrays layer by layer, tie them,
keep what `ready` returns for backward, and differentiate `gather` as if it gathered the shards.
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
from ._optimizer_axes import stored_specs
from ._ranks import ranks_spec
from ._wire_spec import ModulePath, WireSpec

# Fused weights by name, or their codes if the codes are multiplied.
FusedWeights = dict[ModulePath, jax.Array | QuantizedArray]


class Wire(abc.ABC):
    """What a rank sends of fused weights that travel together. A wire is a dataclass and a pytree.

    `members` must be a field, and `gather` must use its names: a chain renames members with `dataclasses.replace`. The
    arrays of a wire for the layers of a stack have a leading dimension. Those for one layer have at least one
    dimension, except an amax of frozen codes. All methods except `specs` handle one layer, and are called inside a
    `shard_map`.

    Attributes:
        members: the names of the fused weights, in order.
        format: the format of its codes, which must equal `WireSpec.wire` of its members, because wires are looked up
            by it; `None` for arrays that are in no format.
    """

    members: tuple[ModulePath, ...]
    format: Any

    @abc.abstractmethod
    def gather(self, groups: Mapping[ModulePath, WireSpec]) -> FusedWeights:
        """Returns the fused weights of its members, made from what all ranks send.

        `fuse(parts, layouts)` makes a fused weight from the decoded parts of all ranks, `(ranks, *experts, rows,
        cols)`.
        """

    def ready(self, groups: Mapping[ModulePath, WireSpec]) -> Wire | None:
        """Returns a wire to send instead, made without communication, which a chain may keep for backward; `None` to
        send this wire itself."""
        del groups

    def specs(self, groups: Mapping[ModulePath, WireSpec], *, stacked: bool = False) -> Any:
        """Returns the partitions of its arrays in global view, a pytree prefix. By default, the arrays differ from rank
        to rank (`ranks_spec`).

        Args:
            groups: the groups of its members.
            stacked: whether its arrays have the leading dimension of a stack.
        """
        del groups
        return ranks_spec(stacked=stacked)


@runtime_checkable
class OwnFormat(WireFormat, Protocol):
    """Describes a format of your own, which is the `wire` of a recipe. It is hashable and compared by value.

    Weights in such a format are decoded before they are multiplied. They can be neither frozen nor gathered in
    advance (`pregathered_layers`).
    """

    def make(self, shards: Mapping[ModulePath, Shards], groups: Mapping[ModulePath, WireSpec]) -> Wire:
        """Returns what this rank sends of weights that travel together. In a stack, these are the weights of a layer
        that have the same format, dtype and axes; outside stacks, those of one module, or some that `gtp_jax.shard`
        gathers together.

        Called inside a `shard_map`, once per step, or once per call under `use_recipe`. It is never differentiated.

        Args:
            shards: one array per kernel, by name of the fused weight, with or without the leading dimension of a stack.
                It is the kernel's shard or, if `group.divided`, the part of the shard that this rank stores.
                `part_of(kernels, layouts, dtype)` accepts both, and gathers the latter over dp in that dtype: quantize
                first, and pass it the codes as uint8.
            groups: the decisions about the weights, by the same names.
        """
        ...

    def wire_bytes(self, group: WireSpec) -> int:
        """Returns the number of bytes of one layer's gathered weight on the wire: those of all ranks' shards."""
        ...


@functools.partial(jax.tree_util.register_dataclass, data_fields=("shards",), meta_fields=("members", "joined"))
@dataclasses.dataclass(frozen=True)
class Kernels(Wire):
    """This rank's shards of one fused weight's kernels. They are cast and concatenated when they are gathered.

    Attributes:
        shards: one array per kernel: its shard, or the part of the shard that this rank stores, which a gather first
            joins with the others.
        members: the name of the fused weight.
        joined: whether the shards have been joined from the parts that ranks store.
    """

    shards: Shards
    members: tuple[ModulePath, ...] = ((),)
    joined: bool = False
    format = None

    def ready(self, groups: Mapping[ModulePath, WireSpec]) -> Part | None:
        """Returns this rank's part of the fused weight; `None` if nothing is sent or cast, or if making the part takes
        communication."""
        group = groups[self.members[0]]
        if group.divided or not group.travels or all(shard.dtype == group.dtype for shard in self.shards):
            return None
        return Part(part_of(self.shards, group.layouts, group.dtype), self.members)

    def gather(self, groups: Mapping[ModulePath, WireSpec]) -> FusedWeights:
        """Returns the fused weight; for `WireSpec.array`, the array in its own shape."""
        group = groups[self.members[0]]
        return Part(part_of(self.shards, group.layouts, group.dtype), self.members).gather(groups)

    def specs(self, groups: Mapping[ModulePath, WireSpec], *, stacked: bool = False) -> Kernels:
        """Returns the partitions of its shards."""
        del stacked  # known from the number of dimensions of each shard
        layouts = groups[self.members[0]].layouts
        layouts = [layout.of_shards for layout in layouts] if self.joined else layouts
        return dataclasses.replace(self, shards=stored_specs(layouts, self.shards))  # pyright: ignore[reportArgumentType]


@functools.partial(jax.tree_util.register_dataclass, data_fields=("array",), meta_fields=("members",))
@dataclasses.dataclass(frozen=True)
class Part(Wire):
    """This rank's part of one fused weight, in the form that is sent.

    Attributes:
        array: the part, `(*experts, rows of kernel 0 | rows of kernel 1 | ..., cols)`.
        members: the name of the fused weight.
    """

    array: jax.Array
    members: tuple[ModulePath, ...]
    format = None

    def gather(self, groups: Mapping[ModulePath, WireSpec]) -> FusedWeights:
        """Returns the fused weight; for `WireSpec.array`, the array in its own shape."""
        group = groups[self.members[0]]
        weight = gather_part(self.array, group.layouts)
        return {self.members[0]: weight if group.array is None else group.array.from_fused(weight)}
