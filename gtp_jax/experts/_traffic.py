"""Computes what a rank sends when a `MoE` with experts divided among ranks runs forward and backward."""

from __future__ import annotations

import dataclasses
from typing import Literal

from ..formats import Format, codes_shape, scales_shape
from ._transports import Transport

_INDEX_BYTES = 4  # a choice is int32
_AMAX_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Traffic:
    """One kind of data that the ranks of experts send each other, for one layer and microbatch.

    Attributes:
        direction: the pass.
        what: what is sent; ends in "again" if backward repeats what forward sent.
        kind: the kind of the collective.
        dtype: the dtype in which the data travel; codes and 16-bit floats travel as unsigned integers.
        count: the number of collectives, one per chunk if tokens travel in chunks. On GPUs, XLA merges those that are
            ready at the same time.
        bytes: the bytes that leave a rank in all of these collectives, if all experts are equally likely; with groups
            of experts, an upper bound.
    """

    direction: Literal["forward", "backward"]
    what: str
    kind: str
    dtype: str
    count: int
    bytes: int


def traffic_of_layer(
    *,
    ranks: int,
    transport: Transport,
    tokens: int,
    top_k: int,
    chunks: int,
    rows: float,
    width: int,
    itemsize: int,
    form: Format | None,
    keeps_shares: bool,
) -> tuple[Traffic, ...]:
    """Returns what a rank sends, in the order of `exchange`.

    Args:
        ranks: the number of ranks that divide the experts.
        transport: how tokens travel.
        tokens: the number of tokens per rank.
        top_k: the number of experts per token.
        chunks: the number of chunks in which tokens travel.
        rows: the number of rows that leave a rank in all dispatches of a pass.
        width: the number of features of a row.
        itemsize: the bytes per number in the compute dtype.
        form: the format of the codes in which tokens travel; `None` if they travel in the compute dtype.
        keeps_shares: whether the shares of all ranks are saved for backward.
    """
    of_choices, share_bytes = (ranks - 1) * tokens * top_k, max(4, itemsize)
    there = {"gather": "all-gather", "padded": "all-to-all", "ragged": "ragged-all-to-all"}[transport]
    back = "all-to-all" if transport == "gather" else there
    wide = f"f{8 * share_bytes}"
    shares = "all-gather", wide, 1, of_choices * share_bytes
    row = "u16" if itemsize == 2 else f"f{8 * itemsize}", chunks, int(rows * width * itemsize)
    token = row if form is None else ("u8", chunks, int(rows * token_bytes(width, itemsize, form)))
    amax = Traffic("forward", "amax of tokens", "all-reduce", "f32", 1, 2 * (ranks - 1) * _AMAX_BYTES // ranks)
    return (
        Traffic("forward", "choices", "all-gather", "s32", 1, of_choices * _INDEX_BYTES),
        Traffic("forward", "shares", *shares),
        *([amax] if form is not None and form.has_amax else []),
        Traffic("forward", "dispatch of tokens", there, *token),
        Traffic("forward", "combine of partial sums", back, *row),
        *([] if keeps_shares else [Traffic("backward", "shares, again", *shares)]),
        Traffic("backward", "dispatch of tokens, again", there, *token),
        Traffic("backward", "dispatch of gradients of partial sums", there, *row),
        Traffic("backward", "combine of gradients of tokens", back, *row),
        Traffic("backward", "gradients of shares", "all-to-all", wide, 1, of_choices * share_bytes),
    )


def token_bytes(width: int, itemsize: int, form: Format | None) -> int:
    """Returns the bytes of a token as it travels to its experts: its numbers, or its codes and their scales.

    Args:
        width: the number of features of the token.
        itemsize: the bytes per number in the compute dtype.
        form: the format of the codes; `None` if the token travels in the compute dtype.
    """
    if form is None:
        return width * itemsize
    scales = scales_shape(form, (1, width), False)
    scale = 4 if form.scale == "float32" else 1
    return codes_shape(form, (1, width), False)[1] + (0 if scales is None else scale * scales[1])
