"""A wire format of one's own: E4M3 with one float32 scale per row of output features, or per row of a shard.

What a user writes: a wire, a format that makes it, a recipe that chooses it. Nothing here is known to the library.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gtp_jax.collectives import all_gather
from gtp_jax.recipes import Recipe
from gtp_jax.weights import FusedWeights, Wire, WireSpec, fuse, part_of

LARGEST = 448.0


@functools.partial(jax.tree_util.register_dataclass, data_fields=("codes", "scales"), meta_fields=("members", "format"))
@dataclasses.dataclass(frozen=True)
class Rows(Wire):
    """Codes and scales of each fused weight's rows on this rank.

    Attributes:
        codes: uint8 `(*stack, *experts, rows, cols)` of each member.
        scales: float32 `(*stack, *experts, rows, 1)` of each member.
        members: the names of the fused weights.
        format: that made it.
    """

    codes: tuple[jax.Array, ...]
    scales: tuple[jax.Array, ...]
    members: tuple[Any, ...]
    format: RowScaled

    def gather(self, groups: Mapping[Any, WireSpec]) -> FusedWeights:
        found = {}
        for name, codes, scales in zip(self.members, self.codes, self.scales, strict=True):
            group, first = groups[name], groups[name].layouts[0]
            if first.ranks == 1:
                parts = codes[None], scales[None]
            else:
                parts = (all_gather(x[None], first.axes, dim=0) for x in (codes, scales))
            codes, scales = parts
            values = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32) * scales
            found[name] = fuse(values.astype(group.dtype), group.layouts)
        return found


@dataclasses.dataclass(frozen=True)
class RowScaled:
    """E4M3, one scale per row."""

    name: str = "ROW_SCALED"

    def make(self, shards: Mapping[Any, Any], groups: Mapping[Any, WireSpec]) -> Rows:
        codes, scales = [], []
        for name, own in shards.items():
            layouts = groups[name].layouts
            part = part_of(own, layouts, jnp.float32)
            amax = jnp.max(jnp.abs(part), axis=-1, keepdims=True)
            scale = jnp.where(amax > 0, amax / LARGEST, 1.0)
            codes.append(lax.bitcast_convert_type((part / scale).astype(jnp.float8_e4m3fn), jnp.uint8))
            scales.append(scale)
        return Rows(tuple(codes), tuple(scales), tuple(shards), self)

    def wire_bytes(self, group: WireSpec) -> int:
        rows = sum(one.shards * one.matrix_of(one.shard_shape)[0] * one.matrices for one in group.layouts)
        elements = sum(one.shape[0] * one.shape[1] for one in group.layouts)
        return elements + 4 * rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowScaledRecipe(Recipe):
    """Weights travel in E4M3, one scale per row."""

    @property
    def wire(self) -> RowScaled:
        return RowScaled()
