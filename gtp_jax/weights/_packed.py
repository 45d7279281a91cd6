"""Codes in the buffer in which they travel, to whole weights. Called inside a `shard_map`.

All kernels of one layer travel as one buffer of bytes, even those of several modules. What comes out lies as
`gather_weight` would leave it, see [Note: the fused weight], so that nothing behind the gather knows whether there was
a format.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float

from ..formats import Format, QuantizedArray
from ..layout import Layout
from ..ops import unpack
from ._fused import fuse, fuse_kernels, own_experts
from ._group import ModulePath, WeightGroup
from ._plan import Fused, plan_of, shards_fit
from ._stretch import Apart
from ._wire import FusedWeights, Wire


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("buffer", "amax"), meta_fields=("format", "members", "gathered")
)
@dataclasses.dataclass(frozen=True)
class Packed(Wire):
    """This rank's shards of a layer's weights, or of a stack of layers', as they travel; or all ranks', once they have.

    Attributes:
        buffer: uint8 `(*stack, bytes)`; `(*stack, ranks, bytes)` if gathered. Each layer of a stack that is written out
            may have an array of its own.
        amax: float32 `(*stack, kernels)`, of experts those of every expert in turn, over all shards; `None` if the
            format has none. It does not travel.
        format: of the codes.
        members: names of the fused weights in it, in order.
        gathered: whether all shards are here.
    """

    buffer: jax.Array | Apart
    amax: jax.Array | None
    format: Format
    members: tuple[ModulePath, ...]
    gathered: bool = False

    @property
    def array(self) -> jax.Array:
        """Returns the buffer, which is one array: of one layer, or of a stack that does not lie apart."""
        assert not isinstance(self.buffer, Apart)
        return self.buffer

    def gather(self, groups: Mapping[ModulePath, WeightGroup]) -> FusedWeights:
        """Returns the fused weights of one layer, from one gather; of one that is multiplied as codes its codes."""
        members = [groups[name] for name in self.members]
        if len(members) == 1 and members[0].as_codes:
            return {self.members[0]: gather_codes(self, members[0].layouts)}
        found = gather_packed(self, [member.layouts for member in members], members[0].dtype)
        return dict(zip(self.members, found, strict=True))


def gather_packed(packed: Packed, fused: Fused, dtype: jax.typing.DTypeLike) -> tuple[Float[jax.Array, "... _ _"], ...]:
    """Returns the fused weights of one layer, each as `gather_weight` gives it, from one gather of bytes.

    Args:
        packed: of one layer.
        fused: the layouts of each member's kernels; all with the same axes.
        dtype: of the weights.
    """
    buffers = packed.array if packed.gathered else _of_all_ranks(packed.array, fused, axis=0)
    exact = jnp.float32 if np.dtype(dtype) == np.float64 else dtype
    plan, by_shard = plan_of(fused, packed.format), shards_fit(fused, packed.format)
    if not by_shard:
        buffers = jnp.reshape(buffers, (1, -1))[:, : plan.bytes(packed.format)]
    weights = unpack(buffers, packed.format, packed.amax, plan, exact)
    make = _from_shards if by_shard else _from_whole
    return tuple(make(weight.astype(dtype), layouts) for weight, layouts in zip(weights, fused, strict=True))


def _from_shards(weight: jax.Array, layouts: Sequence[Layout]) -> jax.Array:
    """Returns all ranks' rows one after another, in the shape of the fused weight."""
    first = layouts[0]
    return fuse(jnp.reshape(weight, (first.ranks, *first.shard_shape[:-2], -1, weight.shape[-1])), layouts)


def _from_whole(weight: jax.Array, layouts: Sequence[Layout]) -> jax.Array:
    """Returns whole kernels' rows one after another, in the shape of the fused weight."""
    whole = jnp.reshape(weight, (*layouts[0].shard_shape[:-2], -1, weight.shape[-1]))
    ends = np.cumsum([layout.matrix_of(layout.whole_shape)[0] for layout in layouts])
    return fuse_kernels(jnp.split(whole, ends[:-1], axis=-2), layouts)


def gather_codes(packed: Packed, layouts: Sequence[Layout]) -> QuantizedArray:
    """Returns the fused weight of one layer, alone in its bundle and of one scale, as the codes that travel: no kernel
    runs. Each expert's has a scale of its own.

    Args:
        packed: of one layer, in a format without blocks.
        layouts: of its kernels.
    """
    assert packed.amax is not None and packed.format.block is None
    buffers = packed.array if packed.gathered else _of_all_ranks(packed.array, [layouts], axis=0)
    plan = plan_of([layouts], packed.format)
    (matrix,) = plan.outputs(len(buffers))
    codes = buffers
    if buffers.size != math.prod(matrix):  # sections begin at multiples of 16 bytes
        ends = [(section.start, section.start + section.bytes) for section, _ in plan.sections(packed.format)]
        codes = jnp.concatenate([buffers[:, start:end] for start, end in ends], axis=1)
    fused = _from_shards(jnp.reshape(codes, matrix), layouts)  # the code 0 is the number 0, in padding too
    amax = packed.amax[0]
    if fused.ndim > 2:  # of every shard of every expert
        amax = jnp.broadcast_to(own_experts(packed.amax[:: len(layouts)], layouts[0]), fused.shape[:-2])
    return QuantizedArray(fused, None, amax, packed.format, (fused.shape[-2], fused.shape[-1]))


def pregather_layers(packed: Packed, fused: Fused, start: int, stop: int) -> Packed:
    """Returns layers `start` to `stop` (exclusive) of a stack with all ranks' shards, from one gather."""
    some = jax.tree.map(lambda a: a[start:stop], packed)
    return dataclasses.replace(some, buffer=_of_all_ranks(some.array, fused, axis=1), gathered=True)


def _of_all_ranks(buffer: jax.Array, fused: Fused, axis: int) -> jax.Array:
    if fused[0][0].ranks == 1:
        return jnp.expand_dims(buffer, axis)
    return lax.all_gather(buffer, fused[0][0].axes, axis=axis)
