"""Sums gradients by an all-to-all followed by a float32 sum. Called inside a `shard_map`.

A reduce-scatter adds in transit, and rounds every partial sum to the dtype of the wire. Here, each rank divides its
gradient into shares, one for each rank, and sends them in fewer bits. It adds the shares that arrive in float32: each
rank's gradient is rounded once, and sums stay in float32. ZeRO++ (arXiv 2306.10209) does the same in a hierarchy of
nodes; within one host, a single level is enough.

A rank's own share is rounded as well, so that no rank's sequences count more precisely than another's.

[Note: error]
Values are rounded to the nearest: the error is at most 2**-8 of an element in bfloat16. In E4M3, it is at most 2**-4 of
an element that is at least 2**-14 of the largest number that the scale allows; smaller elements may lose more. bfloat16
loses nothing of a gradient that is bfloat16 already, as with `grad_reduce="bf16"` in a bfloat16 module. FP8 and MXFP8
lose 2.7 % of random normal gradients in the L2 norm, for 2 ranks and for 8, because errors and sums grow at the same
rate. A bfloat16 reduce-scatter that rounds only once loses 0.17 % (`gtp-jax bench collectives --gtp 8`, column `error`,
on virtual CPU devices). The rounding is not stochastic, and therefore biased: a power of two attracts numbers above it
from a greater distance than numbers below it. Normally distributed numbers shrink by 0.1 % on average
(`tests/recipes/test_gradient_exchange.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float

from ..collectives import moved_in_bits
from ..formats import Format, PackPlan, Piece
from ..layout import Layout
from ..ops import multi_amax, pack, power_of_two_amax, quantizable, unpack
from ._fused import unfuse

_Send = Callable[[jax.Array], jax.Array]


def exchange_gradients(
    gradients: Sequence[Float[jax.Array, "... _ _"]], fused: Sequence[Sequence[Layout]], wire: Format | np.dtype
) -> list[jax.Array]:
    """Reduces the gradients of several fused weights like `reduce_gradient`, by one all-to-all and a sum in float32.

    If the result is differentiated again, its derivative is that of the sum: rounding counts as the identity.

    Args:
        gradients: the gradients, each of its fused weight's shape.
        fused: the layouts of each weight's kernels; all have the same axes, with more than one rank.
        wire: a format without blocks or with blocks of one row, or a dtype of 16 bits. An amax is that of one rank's
            share of a matrix, rounded up so that the scale is a power of two, and is sent after the codes.

    Returns:
        For each weight, this rank's part of the sum, float32 `(matrices, rows, cols)`.
    """
    ranks, axes = fused[0][0].ranks, fused[0][0].axes
    unfused = [unfuse(gradient, layouts) for gradient, layouts in zip(gradients, fused, strict=True)]
    parts = [
        jnp.reshape(part, (ranks, layouts[0].matrices, -1, part.shape[-1]))
        for part, layouts in zip(unfused, fused, strict=True)
    ]
    send = functools.partial(lax.all_to_all, axis_name=axes, split_axis=0, concat_axis=0, tiled=True)

    @jax.custom_jvp
    def exchange(parts: list[jax.Array]) -> list[jax.Array]:
        return _as_codes(parts, wire, send) if isinstance(wire, Format) else _rounded(parts, wire, send)

    @exchange.defjvp
    def _(primals: tuple[Any], tangents: tuple[Any]) -> tuple[list[jax.Array], list[jax.Array]]:
        return exchange(*primals), [send(part.astype(jnp.float32)) for part in tangents[0]]

    return [jnp.sum(part, axis=0) for part in exchange(parts)]


def _rounded(parts: Sequence[jax.Array], dtype: np.dtype, send: _Send) -> list[jax.Array]:
    """Sends shares in a dtype. Returns, for each weight, the shares that arrive, in float32."""
    flat = [jnp.reshape(part.astype(dtype), (part.shape[0], -1)) for part in parts]
    wide = moved_in_bits(send, jnp.concatenate(flat, axis=1)).astype(jnp.float32)
    ends = np.cumsum([x.shape[1] for x in flat])
    return [jnp.reshape(x, p.shape) for x, p in zip(jnp.split(wide, ends[:-1], axis=1), parts, strict=True)]


def _as_codes(parts: Sequence[jax.Array], form: Format, send: _Send) -> list[jax.Array]:
    """Sends shares as codes. Returns, for each weight, the shares that arrive, in float32."""
    plan = _plan(parts)
    given = [quantizable(part) for part in parts]
    if not form.has_amax:
        values = unpack(send(pack(given, form, None, plan)), form, None, plan)
        return [jnp.reshape(x.astype(jnp.float32), part.shape) for x, part in zip(values, parts, strict=True)]
    ranks = parts[0].shape[0]
    matrices = [part.shape[1] for part in parts]
    each = multi_amax([jnp.reshape(x, (-1, *x.shape[2:])) for x in given], stacked=True)
    shares = jnp.split(each, np.cumsum([ranks * count for count in matrices])[:-1])
    own = power_of_two_amax(jnp.concatenate([jnp.reshape(x, (ranks, -1)) for x in shares], axis=1), form)
    behind = jnp.reshape(lax.bitcast_convert_type(own, jnp.uint8), (ranks, -1))
    received = send(jnp.concatenate([pack(given, form, own, plan), behind], axis=1))
    codes, behind = jnp.split(received, [plan.bytes(form)], axis=1)
    amax = lax.bitcast_convert_type(jnp.reshape(behind, (ranks, -1, 4)), jnp.float32)
    # `unpack` takes one amax for all ranks: decode with a scale of 1, then multiply by each rank's own scale
    values = unpack(codes, form, jnp.full(sum(matrices), form.element_max, jnp.float32), plan)
    scales = jnp.split(amax / form.element_max, np.cumsum(matrices)[:-1], axis=1)
    return [
        jnp.reshape(x, part.shape).astype(jnp.float32) * scale[..., None, None]
        for x, part, scale in zip(values, parts, scales, strict=True)
    ]


def _plan(parts: Sequence[jax.Array]) -> PackPlan:
    """Returns the plan of the buffer that one rank sends another, with one piece per matrix."""
    return PackPlan(
        tuple(
            Piece(
                rows=rows,
                cols=cols,
                transposed=False,
                total_rows=rows,
                out=out,
                out_row=index * rows,
                source=(out, index),
            )
            for out, (_, matrices, rows, cols) in enumerate(part.shape for part in parts)
            for index in range(matrices)
        ),
        by_shard=True,
    )
