"""Gathers buffers of codes, and decodes them to fused weights. Called inside a `shard_map`.

Kernels of a layer may share a buffer even if they belong to several modules; see `buffer_of`. Decoded weights have the
layout that `gather_weight` gives them (see [Note: the fused weight]), so that code after the gather does not depend on
whether the weights travelled in a format.
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
from ._blocks import Fused, shards_fit
from ._fused import fuse, fuse_kernels, own_experts
from ._plan import plan_of
from ._stretch import Apart
from ._wire import FusedWeights, Wire
from ._wire_spec import ModulePath, WireSpec


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("buffer", "amax"), meta_fields=("format", "members", "gathered")
)
@dataclasses.dataclass(frozen=True)
class Packed(Wire):
    """The codes that this rank sends, or those of all ranks once gathered, for a layer or a stack of layers.

    Attributes:
        buffer: the codes, uint8 `(*stack, bytes)`; `(*stack, ranks, bytes)` if gathered. If a stack is written out,
            each layer may have an array of its own.
        amax: the amax that sets each kernel's scale, float32 `(*stack, kernels)`; in a layer of experts, those of the
            kernels of one expert after another; `None` if the format has none. It is not sent.
        format: the format of the codes.
        members: the names of the fused weights in the buffer, in order.
        gathered: whether the buffer holds the codes of all ranks.
    """

    buffer: jax.Array | Apart
    amax: jax.Array | None
    format: Format
    members: tuple[ModulePath, ...]
    gathered: bool = False

    @property
    def array(self) -> jax.Array:
        """The buffer, which must be one array instead of one per layer (`Apart`)."""
        assert not isinstance(self.buffer, Apart)
        return self.buffer

    def gather(self, groups: Mapping[ModulePath, WireSpec]) -> FusedWeights:
        """Returns the fused weights of one layer, from one gather; for a weight that is multiplied as codes, its
        codes."""
        members = [groups[name] for name in self.members]
        if len(members) == 1 and members[0].as_codes:
            return {self.members[0]: gather_codes(self, members[0].layouts)}
        # in one dtype, which holds what the others do; only `gtp_jax.shard` has members of several dtypes
        widest = jnp.result_type(*(member.dtype for member in members))
        found = gather_packed(self, [member.layouts for member in members], widest)
        return {name: weight.astype(groups[name].dtype) for name, weight in zip(self.members, found, strict=True)}


def gather_packed(packed: Packed, fused: Fused, dtype: jax.typing.DTypeLike) -> tuple[Float[jax.Array, "... _ _"], ...]:
    """Returns the fused weights of one layer, laid out as by `gather_weight`, from one gather of bytes.

    Args:
        packed: the codes of one layer.
        fused: the layouts of each member's kernels; all have the same axes.
        dtype: the dtype of the weights.
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
    """Returns the fused weight, from the rows of all ranks' shards one after another."""
    first = layouts[0]
    return fuse(jnp.reshape(weight, (first.ranks, *first.shard_shape[:-2], -1, weight.shape[-1])), layouts)


def _from_whole(weight: jax.Array, layouts: Sequence[Layout]) -> jax.Array:
    """Returns the fused weight, from the rows of whole kernels one after another."""
    whole = jnp.reshape(weight, (*layouts[0].shard_shape[:-2], -1, weight.shape[-1]))
    ends = np.cumsum([layout.matrix_of(layout.whole_shape)[0] for layout in layouts])
    return fuse_kernels(jnp.split(whole, ends[:-1], axis=-2), layouts)


def gather_codes(packed: Packed, layouts: Sequence[Layout]) -> QuantizedArray:
    """Returns the gathered codes of one layer's fused weight, without decoding them. The weight must be alone in its
    buffer, and have one scale, or one per expert.

    Args:
        packed: the codes of one layer, in a format without blocks.
        layouts: the layouts of its kernels.
    """
    assert packed.amax is not None and packed.format.block is None
    buffers = packed.array if packed.gathered else _of_all_ranks(packed.array, [layouts], axis=0)
    plan = plan_of([layouts], packed.format)
    (matrix,) = plan.outputs(len(buffers))
    codes = buffers
    if buffers.size != math.prod(matrix):  # remove padding: sections begin at multiples of 16 bytes
        ends = [(section.start, section.start + section.bytes) for section, _ in plan.sections(packed.format)]
        codes = jnp.concatenate([buffers[:, start:end] for start, end in ends], axis=1)
    fused = _from_shards(jnp.reshape(codes, matrix), layouts)  # padding with the code 0 decodes to 0
    amax = packed.amax[0]
    if fused.ndim > 2:  # one amax for every shard of every expert
        amax = jnp.broadcast_to(own_experts(packed.amax[:: len(layouts)], layouts[0]), fused.shape[:-2])
    return QuantizedArray(fused, None, amax, packed.format, (fused.shape[-2], fused.shape[-1]))


def pregather_layers(packed: Packed, fused: Fused, start: int, stop: int) -> Packed:
    """Gathers layers `start` to `stop` (exclusive) of a stack at once, and returns them with all ranks' shards."""
    some = jax.tree.map(lambda a: a[start:stop], packed)
    return dataclasses.replace(some, buffer=_of_all_ranks(some.array, fused, axis=1), gathered=True)


def _of_all_ranks(buffer: jax.Array, fused: Fused, axis: int) -> jax.Array:
    if fused[0][0].ranks == 1:
        return jnp.expand_dims(buffer, axis)
    return lax.all_gather(buffer, fused[0][0].axes, axis=axis)
