"""Merges adapters into the model that they were trained beside."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import numpy as np

from ..checkpoint import Checkpoints, Digest, StreamedArray
from ..models import ModelConfig, saved
from ._adapted import Adapted, read_adapted
from ._fresh import fresh_directory


@dataclasses.dataclass(frozen=True)
class Merged:
    """What was merged.

    Attributes:
        config: sizes of the model.
        step: of the run.
        kernels: how many arrays adapters were added to; those of a stack are one.
        values: of what kind these were, in words.
    """

    config: ModelConfig
    step: int
    kernels: int
    values: str


def merge_adapters(checkpoint: str | Path, out: str | Path, *, step: int | None = None) -> Merged:
    """Makes a checkpoint at step 0 of a run with adapters, with `kernel + alpha / rank * a @ b` in place of kernels.

    Sums are of float32 numbers, which are stored, as an import has them. Where the base was frozen as codes, they are
    added to the values of the codes, beside which adapters were trained; not to those of the model that was quantized,
    of which the run has nothing. A layer of a kernel is in memory at a time. `out` appears at the end, complete.

    Args:
        checkpoint: the directory of checkpoints of the run.
        out: a new or an empty directory, of checkpoints then.
        step: which step; the latest by default.

    Raises:
        FileNotFoundError: if there is no such step.
        ValueError: if it has no adapters or is damaged, or if `out` is not empty.
    """
    run = read_adapted(checkpoint, step)
    params = {
        path: StreamedArray(array.shape, np.float32, array.rows, functools.partial(_merged, run, path, {}))
        for path, array in run.base.items()
    }
    extra = {**saved(run.config), **run.origin.extra()}
    with fresh_directory(Path(out)) as directory, Checkpoints(directory) as checkpoints:
        checkpoints.save_params(0, params, extra, files=run.origin.files)
    return Merged(run.config, run.step, len(run.beside), run.values)


def _merged(run: Adapted, path: str, digests: dict[str, Digest], begin: int) -> np.ndarray:
    """Returns a part of an array, and checks the array with its last part."""
    if begin == 0:
        digests.clear()
    base, adapter = run.base[path], run.beside.get(path)
    found = base.read(begin, digests).astype(np.float32)
    stacked = len(base.shape) > 2
    if adapter is not None:
        a, b = (x.astype(np.float32) for x in adapter.read(begin if stacked else None))
        added = np.float32(run.adapters.alpha / run.adapters.rank) * (a @ b)
        found = found + (added[None] if stacked else added)
    if begin + base.rows >= base.shape[0]:
        run.check([*base.damaged(digests), *([] if adapter is None else adapter.damaged())])
    return np.ascontiguousarray(found, np.float32)
