"""Defines a wire format of its own: FP8 with one float32 scale per output feature, chosen by a recipe.

    python examples/07_wire_of_your_own.py      # any machine; 8 virtual CPU devices where there is no GPU

Prints how each weight is sent, and a falling loss. No part of gtp_jax depends on this format; see
[Note: a wire of your own] in gtp_jax/weights/_wire.py.

A row of the gathered matrix (an output feature) is sent as its codes, followed by the four bytes of its scale. The
scale is computed from the whole row, over all axes that shard it, so the values are the same on every mesh. NaN and Inf
become NaN, perhaps with the rest of their row.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gtp_jax.layout import UNDIVIDED, Layout
from gtp_jax.recipes import Recipe
from gtp_jax.weights import FusedWeights, Shards, Wire, WireSpec, bytes_of, fuse, part_of

E4M3 = jnp.float8_e4m3fn
SCALE_BYTES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowFP8(Recipe):
    """Sends weights as E4M3 with one float32 scale per row: 1 + 4 / (input features of a shard) bytes per element."""

    @property
    def wire(self) -> RowScaled:
        return RowScaled()


@dataclasses.dataclass(frozen=True)
class RowScaled:
    """The format, a `gtp_jax.weights.OwnFormat`."""

    name: str = "ROW_FP8"

    def make(self, shards: Mapping[Any, Shards], groups: Mapping[Any, WireSpec]) -> Rows:
        """Returns what this rank sends. Once per step, gathers codes over dp (ZeRO), instead of master weights."""
        parts = [_rows(own, groups[name].layouts) for name, own in shards.items()]
        stack = next(iter(shards.values()))[0].ndim - len(next(iter(groups.values())).layouts[0].shape)
        flat = [jnp.reshape(part, (*part.shape[:stack], -1)) for part in parts]
        return Rows(jnp.concatenate(flat, axis=-1), tuple(shards), self)

    def wire_bytes(self, group: WireSpec) -> int:
        """Returns the bytes of a gathered weight: one per element, and a scale for each row of each shard."""
        rows = sum(math.prod(one.shard_shape) // one.shard_shape[one.cols] for one in group.layouts)
        return bytes_of(group.layouts, 1) + SCALE_BYTES * rows * group.layouts[0].shards


@functools.partial(jax.tree_util.register_dataclass, data_fields=("buffer",), meta_fields=("members", "format"))
@dataclasses.dataclass(frozen=True)
class Rows(Wire):
    """This rank's rows of all weights of a layer, in one buffer.

    Attributes:
        buffer: uint8 `(*stack, bytes)`: the rows of each member, `(*experts, rows, cols + 4)`, flattened.
        members: the names of the fused weights, in the order of the buffer.
        format: the format.
    """

    buffer: jax.Array
    members: tuple[Any, ...]
    format: RowScaled

    def gather(self, groups: Mapping[Any, WireSpec]) -> FusedWeights:
        """Returns the fused weights of one layer, gathered in one all-gather of bytes."""
        first = groups[self.members[0]].layouts[0]
        ranks = first.ranks
        whole = self.buffer[None] if ranks == 1 else lax.all_gather(self.buffer, first.axes)
        found: FusedWeights = {}
        start = 0
        for name in self.members:
            layouts = groups[name].layouts
            cols, height = layouts[0].shard_shape[layouts[0].cols], sum(one.shard_shape[one.rows] for one in layouts)
            shape = (*layouts[0].shard_shape[:-2], height, cols + SCALE_BYTES)
            stop = start + math.prod(shape)
            rows = jnp.reshape(whole[:, start:stop], (ranks, *shape))
            scales = lax.bitcast_convert_type(rows[..., cols:], jnp.float32)
            values = lax.bitcast_convert_type(rows[..., :cols], E4M3).astype(jnp.float32) * scales[..., None]
            found[name] = fuse(values.astype(groups[name].dtype), layouts)
            start = stop
        return found


def _rows(kernels: Shards, layouts: Sequence[Layout]) -> jax.Array:
    """Returns this rank's rows of a fused weight, uint8 `(*stack, *experts, rows, cols + 4)`."""
    codes, scales = zip(*map(_encoded, kernels, layouts), strict=True)
    joined = lax.bitcast_convert_type(jnp.concatenate(scales, axis=-1), jnp.uint8)
    return jnp.concatenate([part_of(codes, layouts, jnp.uint8), joined], axis=-1)


def _encoded(kernel: jax.Array, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """Returns the codes of this rank's part of a kernel, in its shape, and the scales of the rows of the shard."""
    row_axis, col_axis = (dim - len(layout.shape) for dim in (layout.rows, layout.cols))
    divided = kernel.shape[kernel.ndim - len(layout.shape) :] == layout.stored_shape  # otherwise it is already a shard
    optimizer = layout.optimizer if divided else UNDIVIDED
    kernel = kernel.astype(jnp.float32)
    largest = jnp.max(jnp.abs(kernel), axis=col_axis, keepdims=True)
    across = [one for one in (layout.gather, layout.tensor, optimizer) if one.dim == layout.cols and one.ranks > 1]
    axes = tuple(axis for one in across for axis in one.axes)
    largest = lax.pmax(largest, axes) if axes else largest
    scale = jnp.maximum(largest / jnp.finfo(E4M3).max.astype(jnp.float32), jnp.finfo(jnp.float32).tiny)
    codes = lax.bitcast_convert_type((kernel / scale).astype(E4M3), jnp.uint8)
    if optimizer.dim == layout.rows and optimizer.ranks > 1:
        scale = lax.all_gather(scale, optimizer.axes, axis=scale.ndim + row_axis, tiled=True)
    return codes, jnp.squeeze(scale, col_axis)


def main() -> None:
    """Trains a small stack."""
    import optax
    from flax import nnx

    import gtp_jax as gtp

    def loss(model: Any, batch: jax.Array) -> jax.Array:
        return jnp.mean((model(batch) - jnp.flip(batch, -1)).astype(jnp.float32) ** 2)

    jax.config.update("jax_num_cpu_devices", 8)  # where there is no GPU
    with jax.set_mesh(gtp.make_mesh(gtp=jax.device_count())):
        optimizer = optax.adamw(3e-3)
        model = gtp.init(lambda r: gtp.Stack(lambda rngs: gtp.MLP(64, 256, rngs=rngs), 2, rngs=r), nnx.Rngs(0))
        print(gtp.explain(model, RowFP8()))
        state, step = gtp.TrainState.create(model, optimizer), gtp.train_step(loss, optimizer, recipe=RowFP8())
        batch = jax.random.normal(jax.random.key(1), (16, 8, 64), jnp.bfloat16)
        for i in range(20):
            state, metrics = step(state, batch)
            if i % 5 == 4:
                print(f"step {i + 1}: loss {metrics['loss']:.4f}")


if __name__ == "__main__":
    main()
