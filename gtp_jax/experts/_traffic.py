"""What a rank sends when a `MoE` whose experts ranks divide runs forward and backward."""

from __future__ import annotations

import dataclasses
from typing import Literal

from ..formats import Format, codes_shape, scales_shape
from ._transports import Transport

_INDEX_BYTES = 4  # of a choice, int32
_AMAX_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Something that travels between the ranks of experts, of one layer and microbatch.

    Attributes:
        direction: the pass.
        what: travels; "again" where backward repeats what forward sent.
        kind: of the collective.
        dtype: in which it travels: codes, and bits of 16, as unsigned integers.
        count: collectives, one a chunk where tokens travel in chunks. On GPUs XLA joins those that are ready at once.
        bytes: that leave a rank, in all of them, if every expert is as likely as another; with groups of experts at
            most.
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
        ranks: that divide the experts.
        transport: how tokens travel.
        tokens: of a rank.
        top_k: experts a token.
        chunks: parts in which tokens travel.
        rows: that leave a rank in all dispatches of a pass.
        width: features of a row.
        itemsize: bytes of a number of the compute dtype.
        form: of the codes as which tokens travel; `None` if they travel in the compute dtype.
        keeps_shares: whether backward still has all ranks' shares.
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
    """Returns the bytes of a token as it travels to its experts: of its numbers, or of its codes and their scales.

    Args:
        width: features of the token.
        itemsize: bytes of a number of the compute dtype.
        form: of the codes; `None` if there are none.
    """
    if form is None:
        return width * itemsize
    scales = scales_shape(form, (1, width), False)
    return codes_shape(form, (1, width), False)[1] + (0 if scales is None else scales[1])
