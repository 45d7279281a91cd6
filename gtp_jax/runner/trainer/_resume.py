"""Restores a run from its latest intact checkpoint, or from a given step."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax

from ...checkpoint import Checkpoints, DamagedCheckpoint
from ...train import TrainState


@dataclasses.dataclass(frozen=True)
class Resumed:
    """What a run resumes from.

    Attributes:
        state: the train state.
        extra: the `extra` that was saved with the state.
        step: the number of updates made.
        set_aside: renames the steps after `step`, and prints a message; every process must call it.
    """

    state: TrainState
    extra: dict[str, Any]
    step: int
    set_aside: Callable[[], None]


def resume_from(
    source: Checkpoints,
    like: TrainState,
    at: int | None,
    check: Callable[[Mapping[str, Any]], None],
    *,
    in_memory: bool,
) -> Resumed | None:
    """Restores the state; `None` if there is no step. Changes no file.

    Every process must call this; all of them restore the same step.

    Args:
        source: the checkpoints of the run, or its snapshots.
        like: the shapes and shardings of the state.
        at: the step to restore; by default, the latest that is not damaged.
        check: refuses the `extra` of a checkpoint that the run cannot continue from.
        in_memory: whether the steps are snapshots. If so, the latest is restored; the supervisor drops it if it is
            damaged.

    Raises:
        FileNotFoundError: if there is no step `at`.
        ValueError: if the checkpoint is from another model, `check` refuses it, or step `at`, or every step, is
            damaged.
        OSError: if files cannot be read, after several attempts.
    """
    damaged: dict[int, DamagedCheckpoint] = {}
    exactly = source.latest() if in_memory else at
    if exactly is not None:
        state, extra = source.restore(like, exactly)
        step = exactly
    else:
        try:
            state, extra, step = source.restore_last_whole(like, lambda one, error: damaged.update({one: error}))
        except FileNotFoundError:
            if source.steps():
                raise  # a step was deleted meanwhile, which is no reason to start from the beginning
            return None
        except DamagedCheckpoint as error:
            if len(damaged) < 2:
                raise
            raise ValueError(
                f"all checkpoints of the run are damaged: steps {sorted(damaged)}. The latest: {error}"
            ) from error
    check(extra)
    for one, error in damaged.items():
        _say(f"step {one} is damaged: {'; '.join(error.lines[:3])}{'; ...' if len(error.lines) > 3 else ''}")

    def set_aside() -> None:
        kept = [] if in_memory else source.set_aside_after(step, damaged)
        if kept:
            _say(f"continuing from step {step}; later steps are set aside: {', '.join(kept)}")

    return Resumed(state, extra, step, set_aside)


def _say(text: str) -> None:
    if jax.process_index() == 0:
        print(f"gtp-jax train: {text}", file=sys.stderr, flush=True)
