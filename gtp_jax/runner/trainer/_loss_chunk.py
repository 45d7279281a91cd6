"""Chooses whether the loss computes logits in chunks, by the memory that all logits would take."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ...hlo import quantity
from ...mesh import CP, TP
from ...models import ModelConfig
from ._train_flags import TrainConfig

# The share of a device's memory that logits and their gradient may take.
_SHARE = 8

_TOKENS = 4096


def choose_loss_chunk(
    config: TrainConfig, model: ModelConfig, degrees: Mapping[str, int], memory: int | None
) -> tuple[int, str]:
    """Returns the fewest tokens of a chunk of logits, 0 for all tokens at once, and a line that says why there are
    chunks. The line is empty if the settings decide, or if there are no chunks.

    Args:
        config: the configuration of the run.
        model: the configuration of the model.
        degrees: the degrees of the mesh axes, by name.
        memory: the memory of a device in bytes; `None` if it is not known; then all logits are computed.
    """
    chunk = config.execution.loss_chunk
    if chunk is not None or memory is None:
        return chunk or 0, ""
    examples = math.prod(size for axis, size in degrees.items() if axis not in (CP, TP)) * config.execution.microbatches
    tokens = config.batch * config.seq // examples // degrees.get(CP, 1)
    logits = 2 * tokens * model.vocab_size // degrees[TP] * np.dtype(model.dtype).itemsize
    if logits * _SHARE <= memory:
        return 0, ""
    return _TOKENS, (
        f"loss    in chunks of {_TOKENS} tokens, because all logits of a microbatch and their gradient would take "
        f"{quantity(logits, 'B')} on each device, more than 1/{_SHARE} of its {quantity(memory, 'B')}; --loss-chunk 0 "
        "computes them at once"
    )
