"""Codes of weights as they are stored, where no master exists, and as they travel.

Stored, they are arrays of the weight's logical shape, rows of the gathered matrix first, sharded like its shards: so
they mean the same on every mesh, and no device needs another's to lay out the buffer that it sends.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..formats import Format, QuantizedArray
from ..layout import Layout
from ._group import ModulePath, WeightGroup
from ._packed import Packed
from ._plan import Fused, plan_of
from ._wire import FusedWeights, Wire


@functools.partial(jax.tree_util.register_dataclass, data_fields=("kernels",), meta_fields=("members",))
@dataclasses.dataclass(frozen=True)
class StoredCodes(Wire):
    """This rank's codes of a layer's weights, or of a stack of layers', as they are stored.

    Attributes:
        kernels: of each fused weight, its kernels.
        members: names of the fused weights, in order.
    """

    kernels: tuple[tuple[QuantizedArray, ...], ...]
    members: tuple[ModulePath, ...]

    @property
    def format(self) -> Format:
        """Returns that of all of them."""
        return self.kernels[0][0].format

    def gather(self, groups: Mapping[ModulePath, WeightGroup]) -> FusedWeights:
        """Returns the fused weights of one layer."""
        return pack_codes(self, [groups[name].layouts for name in self.members]).gather(groups)

    def specs(self, groups: Mapping[ModulePath, WeightGroup], *, stacked: bool = False) -> StoredCodes:
        """Returns the partitions of the codes of each kernel."""
        layouts = [groups[name].layouts for name in self.members]
        kernels = tuple(tuple(codes_specs(one, self.format, int(stacked)) for one in own) for own in layouts)
        return StoredCodes(kernels, self.members)


def pack_codes(stored: StoredCodes, fused: Fused) -> Packed:
    """Returns the codes of one layer as they travel: what `pack_all` makes of the masters, bit for bit.

    Args:
        stored: of one layer.
        fused: the layouts of each member's kernels.
    """
    weights = list(zip(stored.kernels, fused, strict=True))
    matrices = [one for kernels, layouts in weights for one in _matrices(kernels, layouts)]
    form = stored.format
    pieces: list[jax.Array] = []
    sections = []
    for matrix, (codes, scales) in zip(matrices, plan_of(fused, form).sections(form), strict=True):
        sections.append((codes, matrix.codes))
        if scales is not None and matrix.scales is not None:
            sections.append((scales, matrix.scales))
    end = 0
    for section, array in sorted(sections, key=lambda pair: pair[0].start):
        pieces.append(jnp.pad(jnp.ravel(array), (section.start - end, 0)))
        end = section.start + section.bytes
    buffer = jnp.concatenate(pieces)
    amax = jnp.stack([one.amax for one in matrices if one.amax is not None]) if form.has_amax else None
    padding = plan_of(fused, form).bytes(form) - end
    return Packed(jnp.pad(buffer, (0, padding)), amax, form, stored.members)


def codes_of(packed: Packed, layouts: Sequence[Layout]) -> tuple[QuantizedArray, ...]:
    """Returns a fused weight's kernels, alone in a buffer, as they are stored: the inverse of `pack_codes`.

    Args:
        packed: of one layer, or of a stack of layers; of shards that are whole blocks.
        layouts: of its kernels.
    """
    plan, form = plan_of([layouts], packed.format), packed.format
    lead, count = packed.array.shape[:-1], layouts[0].matrices

    def array(section: Any) -> jax.Array:
        own = packed.array[..., section.start : section.start + section.bytes]
        return jnp.reshape(own, (*lead, *section.shape))

    def joined(arrays: list[jax.Array | None]) -> Any:
        if arrays[0] is None:
            return None
        return arrays[0] if len(layouts[0].shape) == 2 else jnp.stack([a for a in arrays if a is not None], len(lead))

    found = []
    sections = plan.sections(form)
    for number, layout in enumerate(layouts):
        own = range(number, count * len(layouts), len(layouts))
        codes = joined([array(sections[i][0]) for i in own])
        scales = joined([None if sections[i][1] is None else array(sections[i][1]) for i in own])
        amax = joined([None if packed.amax is None else packed.amax[..., i] for i in own])
        found.append(QuantizedArray(codes, scales, amax, form, layout.matrix_of(layout.shape)))
    return tuple(found)


def codes_specs(layout: Layout, form: Format, ahead: int = 0) -> QuantizedArray:
    """Returns the partitions of stored codes, with so many leading dimensions (a stack of layers)."""
    lead, matrix = (None,) * ahead, tuple(layout.matrix_spec)
    return QuantizedArray(
        PartitionSpec(*lead, *matrix),  # pyright: ignore[reportArgumentType]
        None if form.block is None else PartitionSpec(*lead, *matrix),  # pyright: ignore[reportArgumentType]
        PartitionSpec(*lead, *matrix[:-2]) if form.has_amax else None,  # pyright: ignore[reportArgumentType]
        form,
        layout.matrix_of(layout.shape),
    )


def _matrices(kernels: Sequence[QuantizedArray], layouts: Sequence[Layout]) -> list[QuantizedArray]:
    """Returns a layer's kernels; of experts, every expert's kernels in turn."""
    if len(layouts[0].shape) == 2:
        return list(kernels)
    return [jax.tree.map(lambda a, i=expert: a[i], x) for expert in range(layouts[0].matrices) for x in kernels]
