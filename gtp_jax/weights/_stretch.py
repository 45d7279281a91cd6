"""Holds the wires that a step makes once for some or all layers of a stack, and selects those that layers gather."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from ._fused import Shards
from ._wire import Kernels, Wire
from ._wire_spec import ModulePath, WireSpec


@functools.partial(jax.tree_util.register_dataclass, data_fields=("layers",), meta_fields=())
@dataclasses.dataclass(frozen=True)
class Apart:
    """Replaces a stacked array by one array per layer, so that a layer's part is taken without a copy.

    Attributes:
        layers: one array per layer, each a stack of one layer, `(1, *shape)`.
    """

    layers: tuple[jax.Array, ...]

    def joined(self) -> jax.Array:
        """Returns the stacked array, which is a copy. A loop needs it, because its layer indices are traced."""
        return jnp.concatenate(self.layers)

    def only(self, index: int) -> Apart:
        """Returns an `Apart` with only one layer."""
        return Apart((self.layers[index],))

    def layer(self, index: int) -> jax.Array:
        """Returns one layer's array, `(*shape)`; if there is only one layer, the index is ignored."""
        own = self.layers[0] if len(self.layers) == 1 else self.layers[index]
        return own[0]

    def __getitem__(self, layers: slice) -> Apart:
        """Returns an `Apart` with the layers of a slice."""
        return Apart(self.layers[layers])


@functools.partial(jax.tree_util.register_dataclass, data_fields=("wire",), meta_fields=("groups", "start", "stop"))
@dataclasses.dataclass(frozen=True)
class Stretch:
    """A wire that is made once per step, for some layers of a stack or for a module outside stacks.

    Attributes:
        wire: what is gathered instead of the shards.
        groups: the decisions about its members, in order.
        start: the first of its layers in the stack; 0 for a module outside stacks.
        stop: the layer after the last; 1 for a module outside stacks.
    """

    wire: Wire
    groups: tuple[WireSpec, ...]
    start: int
    stop: int

    def specs(self, *, stacked: bool) -> Stretch:
        """Returns the partitions of its arrays in global view, as `Wire.specs` does."""
        groups = dict(zip(self.wire.members, self.groups, strict=True))
        return dataclasses.replace(self, wire=self.wire.specs(groups, stacked=stacked))

    def of(self, start: int, stop: int) -> Wire:
        """Returns the wire of layers `start` to `stop` (exclusive)."""
        if (start, stop) == (self.start, self.stop):
            return self.wire
        at = slice(start - self.start, stop - self.start)
        return jax.tree.map(lambda a: a[at], self.wire, is_leaf=lambda node: isinstance(node, Apart))


def wires_of(
    groups: Mapping[ModulePath, WireSpec],
    made: Sequence[Stretch],
    shards: Mapping[ModulePath, Shards],
    own: Mapping[ModulePath, Shards],
    start: int,
    stop: int,
) -> tuple[tuple[Wire, ...], int]:
    """Returns the wires that layers `start` to `stop` (exclusive) of a stack gather, and the index of layer `start` in
    their arrays. Each weight is a member of one wire. Wires of codes come first, then those of arrays, sorted by name.

    Args:
        groups: the decisions about these layers, by name.
        made: what was made earlier in the step. For each weight, the first that contains these layers in the weight's
            format is used.
        shards: the shards of all layers.
        own: the shards of these layers alone.
        start: the first layer.
        stop: the layer after the last.
    """
    chosen: list[Stretch] = []
    left = set(groups)
    for one in made:
        members = one.wire.members
        here = one.start <= start and stop <= one.stop and left.issuperset(members)
        if here and all(groups[name].wire == one.wire.format for name in members):
            chosen.append(one)
            left -= set(members)
    length = max((one.stop for one in made), default=0)
    shared = all((one.start, one.stop) == (0, length) for one in chosen)
    if shared:  # wires of all layers, indexed without a copy
        wires, first = [one.wire for one in chosen], start
    else:
        wires, first = [one.of(start, stop) for one in chosen], 0
    wires += [Kernels((shards if shared else own)[name], (name,)) for name in left]
    codes = [wire for wire in wires if wire.format is not None]
    return (*codes, *sorted((wire for wire in wires if wire.format is None), key=lambda wire: wire.members)), first
