"""Refusals that are right: messages of the library, each with the draws that it may refuse.

Whatever the documentation says is supported is not in this table, so that refusing it is a failure.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from .grammar import Draw


def _uneven_batch(draw: Draw) -> bool:
    return draw.model.shape[0] % (draw.ranks_of_batch * draw.microbatches) != 0


def _uneven_sequence(draw: Draw) -> bool:
    return draw.sequence_parallel and draw.model.rank > 2 and draw.model.shape[1] % draw.degree("tp") != 0


def _another_reduction(draw: Draw) -> bool:
    experts = [one for one in draw.model.block if one.kind == "moe" and (one.aux or one.z)]
    return any(one.sums != draw.loss.counts for one in experts)


def _count_of_examples(draw: Draw) -> bool:
    experts = [one for one in draw.model.block if one.kind == "moe" and (one.aux or one.z)]
    each_has_tokens = len(draw.model.shape) > 1 and draw.model.shape[1] > 2
    return draw.loss.counts and draw.model.pool is not None and each_has_tokens and any(one.sums for one in experts)


def _small_for_blocks(draw: Draw) -> bool:
    return draw.recipe in ("MXFP8", "NVFP4") and draw.model.width < 32 * draw.degree("gtp", "tp", "ep")


# the type of the error, a pattern of its message, and which draws may raise it
REFUSALS: tuple[tuple[type[Exception], str, Callable[[Draw], bool]], ...] = (
    (ValueError, r"its first dimension is the batch and must be a multiple of", _uneven_batch),
    (ValueError, r"dimension 1 is the sharded sequence and must be a multiple of", _uneven_sequence),
    (ValueError, r"is to be sharded along its sequence, dimension 1, over tp = \d+, which does not", _uneven_sequence),
    (ValueError, r"Build the MoE with `loss_reduction=", _another_reduction),
    (ValueError, r"with a count of at most .* no more than one for each example", _count_of_examples),
    (ValueError, r"fewer than the \d+ of a block of", _small_for_blocks),
)


def allowed(draw: Draw, error: Exception) -> str | None:
    """Returns the words by which an error is known for a refusal that is right for the draw; `None` for another."""
    for kind, pattern, right_for in REFUSALS:
        if isinstance(error, kind) and re.search(pattern, str(error)) and right_for(draw):
            return pattern
    return None
