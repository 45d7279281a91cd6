"""Rounds rows once, and moves their codes to all places where they are multiplied."""

from __future__ import annotations

import dataclasses

import jax
from jax import lax
from jaxtyping import Float

from ...formats import Format, QuantizedArray
from ...mesh import platform
from .._operand import operand_amax, quantizable
from .._quantize import amax_fused, multi_amax, quantize, quantize_fused
from .._save import save_routing
from .._slot import SlottedRows
from ._expand import Window
from ._take import take


def rows_in_codes(x: Float[jax.Array, "rows features"], format: Format, axis: str | None = None) -> SlottedRows:
    """Quantizes rows along their features, as a grouped matmul quantizes its input.

    Args:
        x: the rows, whose gradient goes to the slot of the result.
        format: an FP8 format with a single scale, or a format without an amax whose blocks are parts of a row.
        axis: a mesh axis, inside a `shard_map`, whose ranks share the scale if the format has one for all rows; `None`
            for a scale of this rank alone.
    """
    rows = quantizable(lax.stop_gradient(x))
    if not format.has_amax:
        return SlottedRows(quantize(rows, format), x)
    fused = platform() == "gpu"
    amax = amax_of_rows(rows, fused)
    if axis is not None:
        amax = save_routing(lax.pmax(amax, axis))  # saved under every policy, so that it is not reduced again
    return SlottedRows(rounded_rows(rows, format, amax, fused), x)


def at_places(q: QuantizedArray, window: Window | None) -> QuantizedArray:
    """Returns the codes of the row at each place of a window; without a window, the codes unchanged."""
    if window is None:
        return q
    scales = None if q.scales is None else take(q.scales, window.rows)
    return with_rows(q, take(q.codes, window.rows), scales)


def with_rows(q: QuantizedArray, codes: jax.Array, scales: jax.Array | None) -> QuantizedArray:
    """Returns `q` with the codes and scales of other rows, with the same features and format."""
    return dataclasses.replace(q, codes=codes, scales=scales, matrix=(codes.shape[0], q.matrix[1]))


def amax_of_rows(rows: jax.Array, fused: bool) -> jax.Array:
    """Returns the largest finite magnitude; if `fused`, by operations that XLA may fuse with those that compute the
    rows."""
    return amax_fused(rows) if fused else multi_amax([rows])[0]


def rounded_rows(rows: jax.Array, format: Format, amax: jax.Array, fused: bool) -> QuantizedArray:
    """Returns FP8 codes of rows, scaled by the power of two that follows from an amax; `fused` as in `amax_of_rows`."""
    amax = operand_amax(amax, format)
    return quantize_fused(rows, format, amax) if fused else quantize(rows, format, amax=amax)
