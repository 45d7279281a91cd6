"""Finds the longest sequence that a checkpoint's model was made for."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ...models import POSITIONS, ModelConfig, Origin
from ...ops import MOST
from ._directory import RunDirectory
from ._train_flags import TrainConfig


def context_length(source: Path, origin: Origin, model: ModelConfig) -> int | None:
    """Returns the longest sequence, in tokens, that a model was trained on or that its publisher allows.

    Of several lengths that are known, the longest counts: `--seq` of the run, `max_position_embeddings` of the
    config.json that the model was imported with, and what its rotary scaling extends these to.

    Args:
        source: the directory of a run, or of an import.
        origin: the origin of the checkpoint.
        model: the configuration of the model.

    Returns:
        The number of tokens; `None` if none is known.
    """
    lengths: list[float] = []
    published, scaling = origin.config.get(POSITIONS), getattr(model, "rope_scaling", None)
    if type(published) is int and 0 < published <= MOST:  # files of others may hold anything
        # some publishers give the length before linear scaling, others the one after it
        lengths.append(published * (scaling.factor if scaling is not None and scaling.kind == "linear" else 1))
    if scaling is not None and scaling.kind == "yarn":
        lengths.append(scaling.factor * scaling.original_length)
    run = RunDirectory.around(source)
    if run.is_of_run:
        with contextlib.suppress(ValueError):  # of another version, whose checkpoints may still be read
            lengths.append(TrainConfig.load(run.config).seq)
    return int(max(lengths)) if lengths else None
