"""Packs a layer's weights into one buffer of bytes, which a quantized gather sends, and unpacks them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32, UInt8

from ...formats import Format, PackPlan
from .._implementation import Implementation
from ._call import call
from ._checks import as_values, check_dtype, check_format


def pack(
    shards: Sequence[Float[jax.Array, " ..."]],
    format: Format,
    amax: Float32[jax.Array, "*lead pieces"] | None,
    plan: PackPlan,
    *,
    implementation: Implementation | None = None,
) -> UInt8[jax.Array, "*lead bytes"]:
    """Quantizes this rank's shards of a layer's weights into one contiguous buffer.

    On a GPU, this is one launch per dtype of the shards, unless there are more pieces than one launch supports
    (`ffi/README.md`).

    Args:
        shards: the arrays of the plan, in float32, bfloat16 or float16: `(*lead, rows, cols)`, or `(*lead, cols, rows)`
            if the piece is transposed. If the pieces of the plan have a `source`, the number of pieces comes before
            the last two dimensions. `lead` are the dimensions of a stack of layers.
        format: the number format, such as `gtp_jax.formats.NVFP4`.
        amax: float32 `(*lead, pieces)`, the amax of each weight over all its shards; `None` if the format has none.
        plan: the layout of the buffer.
        implementation: `"reference"`, `"native"`, or `None` for the best available.

    Returns:
        uint8 `(*lead, plan.bytes(format))`.

    Raises:
        TypeError: if an argument has the wrong type or dtype.
        ValueError: if the number or the shapes of the shards, or the shape of `amax`, do not match the plan.
        NotImplementedError: if `implementation` is `"native"`, and there is no kernel for the current platform.
    """
    return call("pack", implementation, *_checked(shards, format, amax, plan), format=format, plan=plan)


def pack_apart(
    shards: Sequence[Float[jax.Array, "layers ..."]],
    format: Format,
    amax: Float32[jax.Array, "layers pieces"] | None,
    plan: PackPlan,
    *,
    implementation: Implementation | None = None,
) -> tuple[UInt8[jax.Array, "1 bytes"], ...]:
    """Quantizes the shards of a stack of layers as `pack` does, but each layer into a buffer of its own.

    On a GPU, the pieces of each layer count separately, so there may be more launches per dtype than in `pack`.

    Args:
        shards: as in `pack`, with one leading dimension.
        format: as in `pack`.
        amax: as in `pack`.
        plan: as in `pack`.
        implementation: as in `pack`.

    Returns:
        For each layer, its row of the result of `pack`: uint8 `(1, plan.bytes(format))`.

    Raises:
        TypeError, ValueError, NotImplementedError: as in `pack`.
    """
    return tuple(call("pack_apart", implementation, *_checked(shards, format, amax, plan), format=format, plan=plan))


def _checked(
    shards: Sequence[jax.Array], format: Format, amax: jax.Array | None, plan: PackPlan
) -> tuple[list[jax.Array], jax.Array]:
    """Checks the arguments, and returns the shards and their amaxes in the form that the implementations take."""
    check_format(format)
    _check_plan(plan)
    arrays = [as_values(f"shards[{index}]", x) for index, x in enumerate(shards)]
    if len(arrays) != len(plan.arrays):
        raise ValueError(f"`shards` has {len(arrays)} arrays, but the plan has {len(plan.arrays)}; pass one per array.")
    lead = arrays[0].shape[: max(0, arrays[0].ndim - len(plan.arrays[0]))]
    for index, (shape, array) in enumerate(zip(plan.arrays, arrays, strict=True)):
        if array.shape != (*lead, *shape):
            raise ValueError(
                f"`shards[{index}]` has shape {array.shape}; it must be the leading dimensions {lead}, followed by the "
                f"shape {shape} of the plan's array."
            )
    return arrays, _amaxes(amax, format, (*lead, len(plan.pieces)))


def unpack(
    buffer: UInt8[jax.Array, "shards bytes"],
    format: Format,
    amax: Float32[jax.Array, " pieces"] | None,
    plan: PackPlan,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[jax.Array, " ..."], ...]:
    """Dequantizes the gathered buffers of all shards into the layer's weights.

    On a GPU, this is one launch, because all weights have the same dtype, unless there are more pieces than one launch
    supports (`ffi/README.md`).

    Args:
        buffer: uint8 `(shards, plan.bytes(format))`, the buffers of all shards in order, as a gather leaves them.
        format: the format that was passed to `pack`.
        amax: float32 `(pieces,)`, the amax that was passed to `pack`; `None` if the format has none.
        plan: the plan that was passed to `pack`.
        dtype: the dtype of the weights: float32, bfloat16 or float16.
        implementation: as in `pack`.

    Returns:
        The outputs of the plan, each `(rows, cols)`, without padding unless the plan is `by_shard`.

    Raises:
        TypeError: if an argument has the wrong type or dtype.
        ValueError: if `buffer` or `amax` has the wrong shape, the shards hold fewer rows than the plan's total, or a
            block would straddle two shards.
        NotImplementedError: as in `pack`.
    """
    check_format(format)
    _check_plan(plan)
    dtype = check_dtype("dtype", dtype)
    if getattr(buffer, "dtype", None) != jnp.uint8:
        raise TypeError(
            f"`buffer` is {getattr(buffer, 'dtype', type(buffer).__name__)}; it must be uint8, as `pack` returns it."
        )
    if buffer.ndim != 2 or buffer.shape[0] < 1 or buffer.shape[1] != plan.bytes(format):
        raise ValueError(
            f"`buffer` has shape {buffer.shape}; it must be (shards, {plan.bytes(format)}) for this plan in "
            f"{format.name}."
        )
    shards = buffer.shape[0]
    for index, piece in enumerate(plan.pieces):
        if shards * piece.rows < piece.total_rows:
            raise ValueError(
                f"piece {index} has {piece.total_rows} rows in total, but {shards} shards of {piece.rows} hold fewer."
            )
        block_rows = format.block[0] if format.block else 1
        if shards > 1 and piece.rows % block_rows:
            raise ValueError(
                f"piece {index} has shards of {piece.rows} rows; with {shards} shards they must be a multiple of "
                f"{block_rows} in {format.name}. Pad them."
            )
    amax = _amaxes(amax, format, (len(plan.pieces),))
    return tuple(call("unpack", implementation, jnp.asarray(buffer), amax, format=format, plan=plan, dtype=dtype))


def _check_plan(plan: Any) -> None:
    if not isinstance(plan, PackPlan):
        raise TypeError(f"`plan` is a {type(plan).__name__}; it must be a gtp_jax.formats.PackPlan.")


def _amaxes(amax: Any, format: Format, shape: tuple[int, ...]) -> jax.Array:
    if amax is None:
        if format.has_amax:
            raise ValueError(
                f"`amax` is missing; {format.name} scales each weight by its amax. See `gtp_jax.ops.multi_amax`."
            )
        return jnp.zeros(shape, jnp.float32)
    if getattr(amax, "dtype", None) != jnp.float32:
        raise TypeError(f"`amax` is {getattr(amax, 'dtype', type(amax).__name__)}; it must be a float32 array.")
    if amax.shape != shape:
        raise ValueError(f"`amax` has shape {amax.shape}; it must be {shape}, with one amax per piece of the plan.")
    return jnp.asarray(amax)
