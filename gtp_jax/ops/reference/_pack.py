"""Packs a layer's weights into one buffer of bytes, and unpacks the buffers of all shards into the layer's weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ...formats import SECTION_BYTES, Format, PackPlan
from ...formats import Section as Section
from ._dequantize import dequantize
from ._quantize import quantize


def pack(shards: Sequence[jax.Array], amax: jax.Array, *, format: Format, plan: PackPlan) -> jax.Array:
    """Packs the row-wise copies of a plan's pieces, with amax `(*lead, pieces)`, into uint8 `(*lead, bytes)`."""
    lead = amax.shape[:-1]
    all_codes, all_scales = [], []
    for index, (piece, (array, matrix)) in enumerate(zip(plan.pieces, plan.sources, strict=True)):
        stored = shards[array] if piece.source is None else shards[array][..., matrix, :, :]
        x = jnp.swapaxes(stored, -1, -2) if piece.transposed else stored
        whole, no_key = amax[..., index], jnp.zeros(2, jnp.uint32)
        codes, scales, *_ = quantize(
            x, whole, whole, no_key, format=format, hadamard=False, stochastic=False, rows=True, columns=False
        )
        all_codes.append(codes)
        if format.block is not None:
            all_scales.append(scales)
    sections = [jnp.reshape(array, (*lead, math.prod(array.shape[len(lead) :]))) for array in all_codes + all_scales]
    padded = [jnp.pad(s, [(0, 0)] * len(lead) + [(0, -s.shape[-1] % SECTION_BYTES)]) for s in sections]
    return jnp.concatenate([jnp.zeros((*lead, 0), jnp.uint8), *padded], axis=-1)


def pack_apart(
    shards: Sequence[jax.Array], amax: jax.Array, *, format: Format, plan: PackPlan
) -> tuple[jax.Array, ...]:
    """Returns for each layer of a stack its row of the result of `pack`, uint8 `(1, bytes)`."""
    return tuple(jnp.split(pack(shards, amax, format=format, plan=plan), amax.shape[0]))


def unpack(
    buffer: jax.Array, amax: jax.Array, *, format: Format, plan: PackPlan, dtype: jnp.dtype
) -> tuple[jax.Array, ...]:
    """Returns the outputs of a plan from the buffers of its shards, `(shards, bytes)`, and amax `(pieces,)`."""
    shards = buffer.shape[0]

    def read(section: Section) -> jax.Array:
        return jnp.reshape(buffer[:, section.start : section.start + section.bytes], (shards, *section.shape))

    parts = []
    for index, (piece, (codes, scales)) in enumerate(zip(plan.pieces, plan.sections(format), strict=True)):
        values = dequantize(
            read(codes),
            jnp.zeros(0, jnp.uint8) if scales is None else read(scales),
            amax[index],
            format=format,
            columns=False,
            shape=(shards, piece.rows, piece.cols),
            dtype=dtype,
        )
        if not plan.by_shard:
            values = jnp.reshape(values, (shards * piece.rows, piece.cols))[: piece.total_rows]
        parts.append(values)
    return tuple(
        jnp.reshape(jnp.concatenate([parts[index] for index in plan.members(out)], axis=-2), shape)
        for out, shape in enumerate(plan.outputs(shards))
    )
