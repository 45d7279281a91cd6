"""What a rank sends when a `MoE` whose experts ranks divide runs forward and backward."""

from __future__ import annotations

import dataclasses
from typing import Literal

from ..collectives import Transport

_INDEX_BYTES = 4  # of a choice, int32


@dataclasses.dataclass(frozen=True)
class Sent:
    """Something that travels between the ranks of experts, of one layer and microbatch.

    Attributes:
        direction: the pass.
        what: travels; "again" where backward repeats what forward sent.
        kind: of the collective.
        dtype: in which it travels: bits of 16 as unsigned integers.
        count: collectives, one a chunk where tokens travel in chunks. On GPUs XLA joins those that are ready at once.
        bytes: that leave a rank, in all of them, if every expert is as likely as another.
    """

    direction: Literal["forward", "backward"]
    what: str
    kind: str
    dtype: str
    count: int
    bytes: int


def sent_by_layer(
    *,
    ranks: int,
    transport: Transport,
    tokens: int,
    top_k: int,
    chunks: int,
    rows_bytes: int,
    row_dtype: str,
    share_bytes: int,
    keeps_shares: bool,
) -> tuple[Sent, ...]:
    """Returns what a rank sends, in the order of `exchange`.

    Args:
        ranks: that divide the experts.
        transport: how tokens travel.
        tokens: of a rank.
        top_k: experts a token.
        chunks: parts in which tokens travel.
        rows_bytes: that leave a rank in all dispatches of a pass.
        row_dtype: on the wire.
        share_bytes: of one number.
        keeps_shares: whether backward still has all ranks' shares.
    """
    numbers = (ranks - 1) * tokens * top_k
    there = {"gather": "all-gather", "padded": "all-to-all", "ragged": "ragged-all-to-all"}[transport]
    back = "all-to-all" if transport == "gather" else there
    wide = f"f{8 * share_bytes}"
    shares = "all-gather", wide, 1, numbers * share_bytes
    dispatch, combine = ((kind, row_dtype, chunks, rows_bytes) for kind in (there, back))
    return (
        Sent("forward", "choices", "all-gather", "s32", 1, numbers * _INDEX_BYTES),
        Sent("forward", "shares", *shares),
        Sent("forward", "dispatch of tokens", *dispatch),
        Sent("forward", "combine of partial sums", *combine),
        *([] if keeps_shares else [Sent("backward", "shares, again", *shares)]),
        Sent("backward", "dispatch of tokens, again", *dispatch),
        Sent("backward", "dispatch of gradients of partial sums", *dispatch),
        Sent("backward", "combine of gradients of tokens", *combine),
        Sent("backward", "gradients of shares", "all-to-all", wide, 1, numbers * share_bytes),
    )
