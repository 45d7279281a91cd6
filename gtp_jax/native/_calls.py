"""Calls the handlers that have a reference. Each function calls one, and declares its results' shapes and latency."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

from ..formats import RUN, Format, PackPlan, codes_shape, scales_shape

NOTHING = jax.ShapeDtypeStruct((0,), jnp.uint8)

# The cost of a kernel in XLA's scheduler: the launch, and the bytes it moves at the rate of a Hopper GPU.
LAUNCH_NS = 2000
_BYTES_PER_NS = 4000


def multi_amax(arrays: Sequence[jax.Array], *, stacked: bool) -> jax.Array:
    """See `reference.multi_amax`."""
    parts = [x.shape[0] if stacked else 1 for x in arrays]
    if not sum(parts):
        return jnp.zeros((0,), jnp.float32)
    result = jax.ShapeDtypeStruct((sum(parts),), jnp.float32)
    return call("gtp_multi_amax", result, arrays, "sequential", parts=np.array(parts, np.int64))


def hadamard_amax(x: jax.Array) -> jax.Array:
    """See `reference.hadamard_amax`."""
    return call("gtp_hadamard_amax", jax.ShapeDtypeStruct((), jnp.float32), [x], "sequential")


def quantize(
    x: jax.Array,
    amax: jax.Array,
    amax_columns: jax.Array,
    key: jax.Array,
    *,
    format: Format,
    hadamard: bool,
    stochastic: bool,
    rows: bool,
    columns: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """See `reference.quantize`."""
    *lead, m, k = x.shape
    padded = -(-m // RUN) * RUN if hadamard else m
    if rows and columns and amax.ndim != amax_columns.ndim:  # the handler expects both to have the same shape
        longest = max(amax.shape, amax_columns.shape, key=len)
        amax, amax_columns = (
            jnp.broadcast_to(jnp.reshape(a, (*a.shape, *(1,) * (len(longest) - a.ndim))), longest)
            for a in (amax, amax_columns)
        )
    results = [
        *(_copy(format, tuple(lead), (m, k), False) if rows else (NOTHING, NOTHING)),
        *(_copy(format, tuple(lead), (padded, k), True) if columns else (NOTHING, NOTHING)),
    ]
    return tuple(
        call(
            "gtp_quantize",
            results,
            [x, amax, amax_columns, key],
            # with stochastic rounding, each example of a `vmap` numbers its runs (`RUN`) from 0
            "sequential" if stochastic else "broadcast_all",
            format=np.int32(format.code),
            hadamard=hadamard,
            stochastic=stochastic,
            rows=rows,
            columns=columns,
        )
    )


def dequantize(
    codes: jax.Array,
    scales: jax.Array,
    amax: jax.Array,
    *,
    format: Format,
    columns: bool,
    shape: tuple[int, ...],
    dtype: jnp.dtype,
) -> jax.Array:
    """See `reference.dequantize`."""
    result = jax.ShapeDtypeStruct((*codes.shape[:-2], *shape[-2:]), dtype)
    operands = [codes, scales, amax]
    return call("gtp_dequantize", result, operands, "broadcast_all", format=np.int32(format.code), columns=columns)


def pack(shards: Sequence[jax.Array], amax: jax.Array, *, format: Format, plan: PackPlan) -> jax.Array:
    """See `reference.pack`."""
    result = jax.ShapeDtypeStruct((*amax.shape[:-1], plan.bytes(format)), jnp.uint8)
    return call("gtp_pack", result, [amax, *shards], "broadcast_all", **_plan(format, plan))


def pack_apart(
    shards: Sequence[jax.Array], amax: jax.Array, *, format: Format, plan: PackPlan
) -> tuple[jax.Array, ...]:
    """See `reference.pack_apart`."""
    layer = jax.ShapeDtypeStruct((1, plan.bytes(format)), jnp.uint8)
    # sequential, because the handler takes only one leading dimension, that of the layers
    return tuple(call("gtp_pack_apart", [layer] * amax.shape[0], [amax, *shards], "sequential", **_plan(format, plan)))


def unpack(
    buffer: jax.Array, amax: jax.Array, *, format: Format, plan: PackPlan, dtype: jnp.dtype
) -> tuple[jax.Array, ...]:
    """See `reference.unpack`."""
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape in plan.outputs(buffer.shape[0])]
    attributes = {**_plan(format, plan), "by_shard": plan.by_shard}
    return tuple(call("gtp_unpack", results, [buffer, amax], "sequential", **attributes))


def stamp(id: jax.Array, *after: jax.Array) -> jax.Array:
    """Returns `id`, int32 `(1,)`, and adds it to the stamps of the device; see `ffi/include/gtp/record.h`.

    On CPUs, waits for the other arguments.
    """
    result = jax.ShapeDtypeStruct((1,), jnp.int32)
    with set_xla_metadata(latency_metadata=str(LAUNCH_NS)):  # with its effect, XLA keeps what nothing reads
        return jax.ffi.ffi_call("gtp_stamp", result, has_side_effect=True)(id, *after)


def _copy(
    format: Format, lead: tuple[int, ...], matrix: tuple[int, int], columns: bool
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    scales = scales_shape(format, matrix, columns)
    return (
        jax.ShapeDtypeStruct((*lead, *codes_shape(format, matrix, columns)), jnp.uint8),
        NOTHING if scales is None else jax.ShapeDtypeStruct((*lead, *scales), jnp.uint8),
    )


def _plan(format: Format, plan: PackPlan) -> dict[str, Any]:
    numbers = [
        (p.rows, p.cols, p.transposed, p.total_rows, p.out, p.out_row, *source)
        for p, source in zip(plan.pieces, plan.sources, strict=True)
    ]
    return {"format": np.int32(format.code), "table": np.array(numbers, np.int64).reshape(-1)}


def call(target: str, results: Any, operands: Sequence[jax.Array], vmap_method: str, **attributes: Any) -> Any:
    """Calls a handler that is bound by memory bandwidth, and tells XLA's scheduler its latency."""
    moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in [*operands, *jax.tree.leaves(results)])
    with set_xla_metadata(latency_metadata=str(LAUNCH_NS + moved // _BYTES_PER_NS)):
        return jax.ffi.ffi_call(target, results, vmap_method=vmap_method)(*operands, **attributes)
