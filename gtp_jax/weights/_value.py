"""What a weight's variable holds in place of an array: pytrees whose static part are weight groups."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from ..collectives import Packed
from ._group import WeightGroup
from ._resolve import Layers
from ._rounding import CallKeys


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("shard", "packed", "keys", "joined"),
    meta_fields=("groups", "starts"),
)
@dataclasses.dataclass(frozen=True)
class Stored:
    """What a rank stores of a kernel, for which something is decided or gathered already; of a stack's layers, stacked.

    Attributes:
        shard: what gradients are taken of.
        groups: what is decided about it, by layers.
        packed: buffers of codes that are gathered in place of shards: of all layers and, ahead of them, of those whose
            codes have been gathered already. The first member of a buffer holds it, in the first kernel.
        keys: of stochastic rounding; `None` where nothing is rounded so.
        joined: shards that are gathered in place of `shard`, each of some layers of a stack.
        starts: the first layer of each of `joined`.
    """

    shard: jax.Array
    groups: tuple[tuple[Layers, WeightGroup], ...]
    packed: tuple[Packed, ...] = ()
    keys: CallKeys | None = None
    joined: tuple[jax.Array, ...] = ()
    starts: tuple[int, ...] = ()

    def joined_layers(self, start: int, stop: int) -> jax.Array:
        """Returns `joined` of layers `start` to `stop` (exclusive) of a stack."""
        first, own = max((first, i) for i, first in enumerate(self.starts) if first <= start)
        whole = self.joined[own]
        return whole if stop - start == len(whole) else whole[start - first : stop - first]


@functools.partial(jax.tree_util.register_dataclass, data_fields=("weight", "keys"), meta_fields=("group",))
@dataclasses.dataclass(frozen=True)
class Gathered:
    """The fused weight of a module's kernels, in the variable of the first; the others' hold `None`.

    Attributes:
        weight: an array or a `SlottedWeight`.
        group: the kernels.
        keys: of stochastic rounding; `None` where nothing is rounded so.
    """

    weight: Any
    group: WeightGroup
    keys: CallKeys | None = None
