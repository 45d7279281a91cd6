"""Converts the codes of weights without masters between their stored form and the buffer that is sent.

Stored codes are in the order `(*experts, rows, cols)` of the gathered matrix, and sharded like the weight's whole
shards. Apart from padding, they are the same on every mesh. Each device fills the buffer that it sends from its own
codes.
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
from ._blocks import Fused
from ._packed import Packed
from ._plan import plan_of
from ._wire import FusedWeights, Wire
from ._wire_spec import ModulePath, WireSpec


@functools.partial(jax.tree_util.register_dataclass, data_fields=("kernels",), meta_fields=("members",))
@dataclasses.dataclass(frozen=True)
class StoredCodes(Wire):
    """This rank's stored codes of the weights of a layer or of a stack of layers.

    Attributes:
        kernels: for each fused weight, the codes of its kernels.
        members: the names of the fused weights, in order.
    """

    kernels: tuple[tuple[QuantizedArray, ...], ...]
    members: tuple[ModulePath, ...]

    @property
    def format(self) -> Format:
        """The format of all codes."""
        return self.kernels[0][0].format

    def gather(self, groups: Mapping[ModulePath, WireSpec]) -> FusedWeights:
        """Returns the fused weights of one layer, or their codes, as `Packed.gather` does."""
        return pack_codes(self, [groups[name].layouts for name in self.members]).gather(groups)

    def specs(self, groups: Mapping[ModulePath, WireSpec], *, stacked: bool = False) -> StoredCodes:
        """Returns the partitions of each kernel's codes."""
        layouts = [groups[name].layouts for name in self.members]
        kernels = tuple(tuple(codes_specs(one, self.format, int(stacked)) for one in own) for own in layouts)
        return StoredCodes(kernels, self.members)


def pack_codes(stored: StoredCodes, fused: Fused) -> Packed:
    """Returns the codes of one layer in the buffer that is sent, bit for bit what `pack_all` makes of the masters.

    Args:
        stored: the stored codes of one layer.
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
    """Returns the codes of a fused weight's kernels in their stored form: the inverse of `pack_codes`.

    Args:
        packed: a buffer of this weight alone, of one layer or of a stack of layers, whose shards consist of whole
            blocks.
        layouts: the layouts of its kernels.
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
    """Returns the partitions of stored codes, their scales and their amaxes.

    Args:
        layout: the layout of the kernel.
        form: the format of the codes.
        ahead: the number of dimensions before the weight's own: 1 for a stack of layers.
    """
    lead, matrix = (None,) * ahead, tuple(layout.matrix_spec)
    scales = tuple(layout.gathered.matrix_spec) if form.cut_by_shards else matrix
    return QuantizedArray(
        PartitionSpec(*lead, *matrix),  # pyright: ignore[reportArgumentType]
        None if form.block is None else PartitionSpec(*lead, *scales),  # pyright: ignore[reportArgumentType]
        PartitionSpec(*lead, *matrix[:-2]) if form.has_amax else None,  # pyright: ignore[reportArgumentType]
        form,
        layout.matrix_of(layout.shape),
    )


def _matrices(kernels: Sequence[QuantizedArray], layouts: Sequence[Layout]) -> list[QuantizedArray]:
    """Returns the kernels of a layer; in a layer of experts, the kernels of one expert after another."""
    if len(layouts[0].shape) == 2:
        return list(kernels)
    return [jax.tree.map(lambda a, i=expert: a[i], x) for expert in range(layouts[0].matrices) for x in kernels]
