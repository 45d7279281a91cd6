"""Merges adapters into the model with which they were trained."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import numpy as np

from ..checkpoint import Checkpoints, StreamedArray, check_values
from ..models import ModelConfig, saved
from ._adapted import Adapted, read_adapted
from ._fresh import fresh_directory


@dataclasses.dataclass(frozen=True)
class Merged:
    """A description of what was merged.

    Attributes:
        config: the configuration of the model.
        step: the step of the run.
        kernels: the number of kernels to which adapters were added; a stack of kernels counts as one.
        values: the formats and dtypes in which the run stored these kernels, in words.
    """

    config: ModelConfig
    step: int
    kernels: int
    values: str


def merge_adapters(checkpoint: str | Path, out: str | Path, *, step: int | None = None) -> Merged:
    """Makes a checkpoint at step 0 from a run with adapters, with kernels replaced by `kernel + alpha / rank * a @ b`.

    Adds in float32 and stores float32, as an import does. If the run froze its base as codes, the adapters are added to
    the values of the codes, with which they were trained. The run does not have the weights before quantization.
    Memory holds one layer of a kernel at a time, or one array that is not stacked. `out` appears only at the end,
    complete.

    Args:
        checkpoint: the directory of the run's checkpoints.
        out: a new or an empty directory, which becomes a directory of checkpoints.
        step: the step to merge; by default, the latest.

    Returns:
        A description of what was merged.

    Raises:
        FileNotFoundError: if there is no such step.
        ValueError: if the step is damaged, or is not of a run with adapters; or if `out` is not empty.
    """
    run = read_adapted(checkpoint, step)
    params = {
        path: StreamedArray(array.shape, np.float32, array.rows, functools.partial(_merged, run, path))
        for path, array in run.base.items()
    }
    extra = {**saved(run.config), **run.origin.extra()}
    with fresh_directory(Path(out)) as directory, Checkpoints(directory) as checkpoints:
        checkpoints.save_params(0, params, extra, files=run.origin.files)
    return Merged(run.config, run.step, len(run.beside), run.values)


def _merged(run: Adapted, path: str, begin: int) -> np.ndarray:
    """Returns some rows of a merged array. With the last rows, checks all that was read of it."""
    base, adapter = run.base[path], run.beside.get(path)
    found = base.read(begin).astype(np.float32)
    stacked = len(base.shape) > 2
    if adapter is not None:
        a, b = (x.astype(np.float32) for x in adapter.read(begin if stacked else None))
        added = np.float32(run.adapters.alpha / run.adapters.rank) * (a @ b)
        found = found + (added[None] if stacked else added)
    if begin + base.rows >= base.shape[0]:
        check_values([*base.parts.values(), *([] if adapter is None else adapter.stored)])
    return np.ascontiguousarray(found, np.float32)
